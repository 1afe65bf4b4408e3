"""Weights stored as numbers of 8 bits with a scale per block, row or tensor: DeepSeek-V3's fp8 among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.checkpoint.base import Format, Parts, row_blocks
from engine.checkpoint.mxfp4 import paired_rows
from engine.checkpoint.stored import StoredTensor

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""
_OF_ACTIVATIONS = (".activation_scale", ".input_scale")
"""Scales beside a weight's that are of its inputs, which stay plain."""


@dataclass(frozen=True)
class ScaledMatrix:
    """A StoredMatrix: numbers [outputs, inputs] of 8 bits, and a float32 scale for each `block` of them.

    The last blocks may be incomplete.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    block: Block

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.numbers.shape[0], self.numbers.shape[1]

    def rows(self, rows: slice | torch.Tensor) -> ScaledMatrix:
        """Some of its outputs, each with scales of its own unless they begin with a block."""
        if isinstance(rows, slice) and rows.step in (None, 1) and not (rows.start or 0) % self.block[0]:
            first = (rows.start or 0) // self.block[0]
            numbers = self.numbers[rows]
            scales = self.scales[first : first + -(-len(numbers) // self.block[0])]
            return ScaledMatrix(numbers, scales, self.block)
        each = torch.arange(self.shape[0], device=self.scales.device)[rows] // self.block[0]
        return ScaledMatrix(self.numbers[rows], self.scales[each], (1, self.block[1]))

    def columns(self, columns: slice) -> ScaledMatrix | None:
        """Neighbouring inputs; None if they begin or end within a block."""
        inputs, width = self.shape[1], self.block[1]
        numbers = self.numbers[:, columns]
        if width >= inputs:
            return ScaledMatrix(numbers, self.scales, (self.block[0], numbers.shape[1]))
        if columns.start % width or (columns.stop % width and columns.stop != inputs):
            return None
        scales = self.scales[:, columns.start // width : -(-columns.stop // width)]
        return ScaledMatrix(numbers, scales, self.block)

    def owned(self) -> ScaledMatrix:
        """A copy."""
        return ScaledMatrix(self.numbers.clone(), self.scales.clone(), self.block)

    def to(self, device: torch.device) -> ScaledMatrix:
        """The same on a device."""
        return ScaledMatrix(self.numbers.to(device), self.scales.to(device), self.block)

    def dequantise(self, into: torch.Tensor) -> None:
        """Write its numbers to a tensor of the same shape."""
        rows, columns = self.shape
        for part in row_blocks(rows, columns, self.block[0]):
            of_rows = self.scales[part.start // self.block[0] : -(-part.stop // self.block[0])]
            each = of_rows.repeat_interleave(self.block[0], 0)[: part.stop - part.start]
            into[part] = self.numbers[part].float() * each.repeat_interleave(self.block[1], 1)[:, :columns]

    def input_scales(self, width: int) -> torch.Tensor | None:
        """Float32 [outputs, inputs / width rounded up]: one for each `width` inputs of an output.

        None if one scale is not enough for that.
        """
        outputs, inputs = self.shape
        count = -(-inputs // width)
        if self.block[1] >= inputs:
            columns = self.scales.expand(-1, count)
        elif self.block[1] % width == 0:
            columns = self.scales.repeat_interleave(self.block[1] // width, 1)[:, :count]
        else:
            return None
        return columns.repeat_interleave(self.block[0], 0)[:outputs].contiguous()


def scaled_format(scale: str, block: Block | None) -> Format:
    """weight = `.weight` times its scale, the tensor with suffix `scale`. `block` None: see _read."""
    read = partial(_read, scale=scale, block=block)
    return Format((scale, ".weight"), read, ".weight", 8, optional=_OF_ACTIVATIONS)


def fp8_format(block: Block | None, has_fp4: bool) -> Format:
    """DeepSeek-V3's. DeepSeek-V4's scales have another name, and are powers of two (E8M0); `has_fp4`: weights
    stored as int8 have two numbers of 4 bits in each byte."""
    scale = ".weight_scale_inv"
    form = scaled_format(scale, block)
    if not has_fp4:
        return replace(form, renamed=((".scale", scale),))
    read = partial(_read_either, scale=scale, block=block)
    return replace(form, renamed=((".scale", scale),), read=read, pairs="I8")


def _read_either(parts: Parts, dtype: torch.dtype, scale: str, block: Block | None) -> StoredTensor:
    """Of 4 bits: int8 [rows, inputs / 2], the low half of a byte first, and E8M0 [rows, inputs / 32]."""
    if parts[".weight"].dtype != torch.int8:
        return _read(parts, dtype, scale, block)
    return StoredTensor([[paired_rows(parts[".weight"], parts[scale])]], dtype, experts=False)


def _read(parts: Parts, dtype: torch.dtype, scale: str, block: Block | None) -> StoredTensor:
    """Without a block, scales are stored as [1] or [rows, 1]."""
    numbers, scales = parts[".weight"], parts[scale].float()
    if numbers.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise ValueError(f"it has a scale, {scale}, but is stored as {numbers.dtype}")
    if numbers.ndim == 3 and len(numbers) == len(scales):  # of all experts (Step 3.7)
        each = zip(numbers, scales, strict=True)
        return StoredTensor([[_matrix(*one, block)] for one in each], dtype, experts=True)
    if numbers.ndim != 2:
        raise ValueError(f"a quantised weight has the shape {tuple(numbers.shape)}, not two dimensions")
    return StoredTensor([[_matrix(numbers, scales, block)]], dtype, experts=False)


def _matrix(numbers: torch.Tensor, scales: torch.Tensor, block: Block | None) -> ScaledMatrix:
    rows, columns = numbers.shape
    if block is None:
        scales = scales.reshape(-1, 1)
        block = (1 if len(scales) == rows else rows, columns)
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales are {tuple(scales.shape)} for a weight of {rows} x {columns}, not {expected}"
        )
    return ScaledMatrix(numbers, scales, block)
