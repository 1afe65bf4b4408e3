"""Weights stored as numbers of 8 bits with a scale per block, row or tensor: DeepSeek-V3's fp8 among them."""

from __future__ import annotations

from functools import partial

import torch

from engine.checkpoint.base import Format, Parts, row_blocks

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""


def scaled_format(scale: str, block: Block | None) -> Format:
    """weight = `.weight` times its scale, the tensor with suffix `scale`. `block` None: see below."""
    return Format((scale, ".weight"), partial(_dequantise, scale=scale, block=block))


def _dequantise(parts: Parts, dtype: torch.dtype, scale: str, block: Block | None) -> torch.Tensor:
    """Scales [1] or [rows, 1] without a block, else one per block. The last blocks may be incomplete."""
    stored, scales = parts[".weight"], parts[scale].float()
    if stored.ndim != 2:
        raise ValueError(f"a quantised weight has the shape {tuple(stored.shape)}, not two dimensions")
    rows, columns = stored.shape
    if block is None:
        scales = scales.reshape(-1, 1)
        block = (1 if len(scales) == rows else rows, columns)
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales are {tuple(scales.shape)} for a weight of {rows} x {columns}, not {expected}"
        )
    weight = torch.empty(rows, columns, dtype=dtype)
    for part in row_blocks(rows, columns, block[0]):
        of_rows = scales[part.start // block[0] : -(-part.stop // block[0])]
        each = of_rows.repeat_interleave(block[0], 0)[: part.stop - part.start]
        weight[part] = stored[part].float() * each.repeat_interleave(block[1], 1)[:, :columns]
    return weight
