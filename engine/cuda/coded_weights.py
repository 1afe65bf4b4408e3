"""Weights of 8 and 4 bits in the order in which the GPU's kernel reads them (stored_kernel.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from engine.checkpoint.grouped import GroupedMatrix
from engine.checkpoint.mxfp4 import Mxfp4Matrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredMatrix


class CodedWeights(NamedTuple):
    """Weights [experts, outputs, inputs] in the order that the kernel reads.

    fp8: `codes` uint8 [experts, outputs, inputs], and float32 `scales`. Where a code is NaN, its scale is.
    MXFP4 and int4: uint8 [experts, outputs, inputs / 2]; 16 bytes are 32 inputs, the first 16 in the lower
    halves. MXFP4 has E8M0 `scales`, uint8; int4 has floats, and `zeros`, the zero points, uint8.

    Of MXFP4 32 inputs of an output share a scale, of fp8 128, and of int4 either.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @classmethod
    def joined(cls, parts: Sequence[CodedWeights], experts: int) -> CodedWeights:
        """One for all experts of parts [outputs, ...], those of one expert after the other's."""

        def join(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
            whole = torch.cat(tuple(tensors))
            return whole.view(experts, -1, whole.shape[-1])

        zeros = [part.zeros for part in parts if part.zeros is not None]
        codes, scales = (join(part[i] for part in parts) for i in (0, 1))  # type: ignore[misc]
        return cls(codes, scales, join(zeros) if zeros else None)

    @property
    def form(self) -> str:
        """As the kernel names formats."""
        if self.zeros is not None:
            return "int4"
        return "mxfp4" if self.scales.dtype == torch.uint8 else "fp8"

    def scale_inputs(self, inputs: int) -> int:
        """How many inputs share a scale."""
        return 128 if self.form != "mxfp4" and self.scales.shape[-1] == -(-inputs // 128) else 32

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Float32 [outputs, inputs] of one expert; those of 4 bits are rounded to `dtype`."""
        codes, scales, zeros = self
        if self.form == "fp8":
            numbers = codes.view(torch.float8_e4m3fn)
            matrix: StoredMatrix = ScaledMatrix(numbers, scales, (1, min(128, codes.shape[1])))
        elif zeros is None:
            matrix = Mxfp4Matrix(_paired(codes).view(*scales.shape, 16), scales)
        else:
            inputs = 2 * codes.shape[1]
            group = self.scale_inputs(inputs)
            matrix = GroupedMatrix(_paired(codes), scales, zeros, inputs, 4, group)
        weight = torch.empty(matrix.shape, dtype=torch.float32 if self.form == "fp8" else dtype)
        matrix.dequantise(weight)
        return weight.float()


def _fp8(matrix: StoredMatrix) -> CodedWeights | None:
    if not isinstance(matrix, ScaledMatrix) or matrix.numbers.dtype != torch.float8_e4m3fn:
        return None
    codes, scales = matrix.numbers.view(torch.uint8), matrix.input_scales(128)
    if scales is None:
        return None
    is_nan = pad(codes & 0x7F == 0x7F, (0, -codes.shape[1] % 128))
    scales.masked_fill_(is_nan.view(*scales.shape, 128).any(-1), torch.nan)
    return CodedWeights(codes, scales, None)


def _mxfp4(matrix: StoredMatrix) -> CodedWeights | None:
    if not isinstance(matrix, Mxfp4Matrix):
        return None
    return CodedWeights(_by_halves(matrix.codes.flatten(1)), matrix.scales, None)


def _int4(matrix: StoredMatrix, scale_inputs: int) -> CodedWeights | None:
    if not isinstance(matrix, GroupedMatrix) or matrix.bits != 4 or matrix.inputs % 32:
        return None
    found = matrix.by_inputs(scale_inputs)
    return None if found is None else CodedWeights(_by_halves(matrix.codes), *found)


FORMATS: tuple[tuple[str, Callable[[StoredMatrix], CodedWeights | None]], ...] = (
    ("fp8", _fp8),
    ("mxfp4", _mxfp4),
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
