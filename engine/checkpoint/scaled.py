"""Weights stored as numbers of 8 bits with a scale per block, row or tensor: DeepSeek-V3's fp8 among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from engine.checkpoint.base import Format, Parts, Stored, row_blocks
from engine.checkpoint.stored import StoredMatrix

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""


def scaled_format(scale: str, block: Block | None) -> Format:
    """weight = `.weight` times its scale, the tensor with suffix `scale`. `block` None: see below."""
    return Format(
        (scale, ".weight"),
        partial(_dequantise, scale=scale, block=block),
        describe=partial(_describe, scale=scale, block=block),
    )


def _describe(parts: Mapping[str, Stored], scale: str, block: Block | None) -> StoredMatrix | None:
    stored = parts[".weight"]
    if stored.get_dtype() != "F8_E4M3":
        return None
    return StoredMatrix("fp8", *_by_block(parts[scale][...], stored.get_shape(), block))


def _by_block(scales: torch.Tensor, shape: Sequence[int], block: Block | None) -> tuple[torch.Tensor, Block]:
    """Float32 scales [blocks of rows, blocks of columns] of a weight, and the size of a block.

    Without a block they are stored as [1] or [rows, 1]. The last blocks may be incomplete.
    """
    if len(shape) != 2:
        raise ValueError(f"a quantised weight has the shape {tuple(shape)}, not two dimensions")
    rows, columns = shape
    scales = scales.float()
    if block is None:
        scales = scales.reshape(-1, 1)
        block = (1 if len(scales) == rows else rows, columns)
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales are {tuple(scales.shape)} for a weight of {rows} x {columns}, not {expected}"
        )
    return scales, block


def _dequantise(parts: Parts, dtype: torch.dtype, scale: str, block: Block | None) -> torch.Tensor:
    stored = parts[".weight"]
    scales, block = _by_block(parts[scale], stored.shape, block)
    rows, columns = stored.shape
    weight = torch.empty(rows, columns, dtype=dtype)
    for part in row_blocks(rows, columns, block[0]):
        of_rows = scales[part.start // block[0] : -(-part.stop // block[0])]
        each = of_rows.repeat_interleave(block[0], 0)[: part.stop - part.start]
        weight[part] = stored[part].float() * each.repeat_interleave(block[1], 1)[:, :columns]
    return weight
