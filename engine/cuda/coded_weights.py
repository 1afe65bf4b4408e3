"""Weights of 8 and 4 bits in the order in which the GPU's kernel reads them (stored_kernel.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from engine.checkpoint.grouped import GroupedMatrix
from engine.checkpoint.mxfp4 import Mxfp4Matrix
from engine.checkpoint.nvfp4 import Nvfp4Matrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredMatrix


class CodedWeights(NamedTuple):
    """Weights [experts, outputs, inputs] in the order that the kernel reads.

    fp8: `codes` uint8 [experts, outputs, inputs], and float32 `scales`. Where a code is NaN, its scale is.
    The others: uint8 [experts, outputs, inputs / 2]; 16 bytes are 32 inputs, the first 16 in the lower
    halves. MXFP4 has E8M0 `scales`, uint8. NVFP4 has those of e4m3, uint8, and float32 `factors` of outputs,
    [experts, outputs, 1]. int4 has floats, and `zeros`, the zero points, uint8.

    Of NVFP4 16 inputs of an output share a scale, of MXFP4 32, of fp8 128, and of int4 32 or 128.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[CodedWeights], experts: int) -> CodedWeights:
        """One for all experts of parts [outputs, ...], those of one expert after the other's."""

        def join(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            found = [each for each in tensors if each is not None]
            return torch.cat(found).view(experts, -1, found[0].shape[-1]) if found else None

        codes, scales, zeros, factors = map(join, zip(*parts, strict=True))
        assert codes is not None
        assert scales is not None
        return cls(codes, scales, zeros, factors)

    @property
    def form(self) -> str:
        """As the kernel names formats."""
        if self.zeros is not None:
            return "int4"
        if self.factors is not None:
            return "nvfp4"
        return "mxfp4" if self.scales.dtype == torch.uint8 else "fp8"

    def scale_inputs(self, inputs: int) -> int:
        """How many inputs share a scale."""
        if self.form in ("mxfp4", "nvfp4"):
            return 32 if self.form == "mxfp4" else 16
        return 128 if self.scales.shape[-1] == -(-inputs // 128) else 32

    def of_expert(self, number: int) -> CodedWeights:
        """Its weights, without the first dimension."""
        zeros, factors = (None if each is None else each[number] for each in (self.zeros, self.factors))
        return CodedWeights(self.codes[number], self.scales[number], zeros, factors)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Float32 [outputs, inputs] of one expert; those of 4 bits are rounded to `dtype`, before factors."""
        codes, scales, zeros, factors = self
        if self.form == "fp8":
            numbers = codes.view(torch.float8_e4m3fn)
            matrix: StoredMatrix = ScaledMatrix(numbers, scales, (1, min(128, codes.shape[1])))
        elif factors is not None:
            one, stored = factors.new_ones(()), scales.view(torch.float8_e4m3fn)
            matrix = Nvfp4Matrix(_paired(codes).view(*scales.shape, 8), stored, one)
        elif zeros is None:
            matrix = Mxfp4Matrix(_paired(codes).view(*scales.shape, 16), scales)
        else:
            inputs = 2 * codes.shape[1]
            group = self.scale_inputs(inputs)
            matrix = GroupedMatrix(_paired(codes), scales, zeros, inputs, 4, group)
        weight = torch.empty(matrix.shape, dtype=torch.float32 if self.form == "fp8" else dtype)
        matrix.dequantise(weight)
        return weight.float() if factors is None else weight.float() * factors


def _fp8(matrix: StoredMatrix) -> CodedWeights | None:
    if not isinstance(matrix, ScaledMatrix) or matrix.numbers.dtype != torch.float8_e4m3fn:
        return None
    codes, scales = matrix.numbers.view(torch.uint8), matrix.input_scales(128)
    if scales is None:
        return None
    is_nan = pad(codes & 0x7F == 0x7F, (0, -codes.shape[1] % 128))
    scales.masked_fill_(is_nan.view(*scales.shape, 128).any(-1), torch.nan)
    return CodedWeights(codes, scales)


def _mxfp4(matrix: StoredMatrix) -> CodedWeights | None:
    if not isinstance(matrix, Mxfp4Matrix):
        return None
    return CodedWeights(_by_halves(matrix.codes.flatten(1)), matrix.scales)


def _nvfp4(matrix: StoredMatrix) -> CodedWeights | None:
    """An output with a scale that is NaN is NaN: its factor is."""
    if not isinstance(matrix, Nvfp4Matrix) or matrix.shape[1] % 32:
        return None
    scales = matrix.scales.contiguous().view(torch.uint8)
    factors = matrix.factor.repeat(len(scales), 1)
    factors.masked_fill_((scales & 0x7F == 0x7F).any(1, keepdim=True), torch.nan)
    return CodedWeights(_by_halves(matrix.codes.flatten(1)), scales, factors=factors)


def _int4(matrix: StoredMatrix, scale_inputs: int) -> CodedWeights | None:
    if not isinstance(matrix, GroupedMatrix) or matrix.bits != 4 or matrix.inputs % 32:
        return None
    found = matrix.by_inputs(scale_inputs)
    return None if found is None else CodedWeights(_by_halves(matrix.codes), *found)


FORMATS: tuple[tuple[str, Callable[[StoredMatrix], CodedWeights | None]], ...] = (
    ("fp8", _fp8),
    ("mxfp4", _mxfp4),
    ("nvfp4", _nvfp4),
    ("int4", partial(_int4, scale_inputs=128)),
    ("int4", partial(_int4, scale_inputs=32)),
)
"""Names, and what the kernel reads of a matrix [outputs, inputs] in that format."""


def _by_halves(pairs: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits [outputs, inputs / 2], neighbours in a byte -> in the order of CodedWeights."""
    halves = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(pairs), -1, 2, 16)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of _by_halves."""
    blocks = codes.view(len(codes), -1, 16)
    numbers = torch.cat((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4
