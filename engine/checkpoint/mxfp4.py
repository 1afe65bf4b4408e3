"""MXFP4 as gpt-oss stores its experts: the OCP microscaling format with blocks of 32 numbers."""

from __future__ import annotations

import torch

from engine.checkpoint.base import Format, Parts
from engine.checkpoint.stored import StoredMatrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code: a sign, two bits of exponent, one of mantissa."""
_BIAS = 127  # of a block's scale, a power of two (E8M0). 255 is NaN


def _dequantise(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """blocks uint8 [experts, outputs, n, 16], scales uint8 [experts, outputs, n] -> [experts, 32 n, outputs].

    The low half of a byte is the first of its two numbers. transformers' module keeps inputs before outputs.
    """
    blocks, scales = parts["_blocks"], parts["_scales"]
    if blocks.dtype != torch.uint8 or blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"blocks are {blocks.dtype} {tuple(blocks.shape)}, scales {tuple(scales.shape)}")
    experts, outputs, count, _ = blocks.shape
    weight = torch.empty(experts, count * 32, outputs, dtype=dtype)
    values = torch.tensor(_E2M1)
    for expert in range(experts):
        halves = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)
        powers = torch.ldexp(torch.ones(outputs, count), scales[expert].int() - _BIAS)
        powers.masked_fill_(scales[expert] == 255, torch.nan)
        weight[expert] = (values[halves.int()] * powers[..., None]).flatten(1).T
    return weight


MXFP4 = Format(("_blocks", "_scales"), _dequantise, result="", describe=lambda _: StoredMatrix("mxfp4"))
