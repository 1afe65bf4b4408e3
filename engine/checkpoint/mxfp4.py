"""MXFP4, the OCP microscaling format with blocks of 32 numbers, as gpt-oss stores its experts, and as
compressed-tensors stores any weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.base import Format, Parts, row_blocks
from engine.checkpoint.stored import StoredTensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code: a sign, two bits of exponent, one of mantissa."""
_BIAS = 127  # of a block's scale, a power of two (E8M0). 255 is NaN


@dataclass(frozen=True)
class Mxfp4Matrix:
    """A StoredMatrix of 32 n inputs: codes uint8 [outputs, n, 16], the low half of a byte first, and scales
    uint8 [outputs, n]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.scales.shape[0], 32 * self.scales.shape[1]

    def rows(self, rows: slice | torch.Tensor) -> Mxfp4Matrix:
        """Some of its outputs."""
        return Mxfp4Matrix(self.codes[rows], self.scales[rows])

    def columns(self, columns: slice) -> Mxfp4Matrix | None:
        """Neighbouring inputs; None if they begin or end within a block."""
        if columns.start % 32 or columns.stop % 32:
            return None
        blocks = slice(columns.start // 32, columns.stop // 32)
        return Mxfp4Matrix(self.codes[:, blocks], self.scales[:, blocks])

    def owned(self) -> Mxfp4Matrix:
        """A copy."""
        return Mxfp4Matrix(self.codes.clone(), self.scales.clone())

    def to(self, device: torch.device) -> Mxfp4Matrix:
        """The same on a device."""
        return Mxfp4Matrix(self.codes.to(device), self.scales.to(device))

    def dequantise(self, into: torch.Tensor) -> None:
        """Write its numbers to a tensor of the same shape."""
        values = torch.tensor(E2M1, device=self.codes.device)
        for part in row_blocks(*self.shape):
            codes, scales = self.codes[part], self.scales[part]
            halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
            powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - _BIAS)
            powers.masked_fill_(scales == 255, torch.nan)
            into[part] = (values[halves.int()] * powers[..., None]).flatten(1)


def _read(parts: Parts, dtype: torch.dtype) -> StoredTensor:
    """blocks uint8 [experts, outputs, n, 16], scales uint8 [experts, outputs, n] -> [experts, 32 n, outputs].

    transformers' module keeps inputs before outputs.
    """
    blocks, scales = parts["_blocks"], parts["_scales"]
    if blocks.dtype != torch.uint8 or blocks.ndim != 4 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"blocks are {blocks.dtype} {tuple(blocks.shape)}, scales {tuple(scales.shape)}")
    matrices = [(Mxfp4Matrix(*each),) for each in zip(blocks, scales, strict=True)]
    return StoredTensor(matrices, dtype, experts=True, transposed=True)


def paired_rows(numbers: torch.Tensor, scales: torch.Tensor) -> Mxfp4Matrix:
    """Bytes [rows, inputs / 2] and E8M0 [rows, inputs / 32]. Raises ValueError unless they fit together."""
    rows, width = numbers.shape
    if scales.dtype not in (torch.float8_e8m0fnu, torch.uint8) or scales.shape != (rows, width / 16):
        raise ValueError(f"scales are {scales.dtype} {tuple(scales.shape)} for {tuple(numbers.shape)} bytes")
    return Mxfp4Matrix(numbers.view(torch.uint8).view(rows, -1, 16), scales.view(torch.uint8))


def _read_packed(parts: Parts, dtype: torch.dtype) -> StoredTensor:
    numbers, scales = parts[".weight_packed"], parts[".weight_scale"]
    if numbers.dtype != torch.uint8 or numbers.ndim != 2:
        raise ValueError(f"numbers of 4 bits are {numbers.dtype} {tuple(numbers.shape)}, not rows of bytes")
    return StoredTensor([[paired_rows(numbers, scales)]], dtype, experts=False)


MXFP4_PACKED = Format(
    (".weight_packed", ".weight_scale"),
    _read_packed,
    ".weight_packed",
    4,
    optional=(".input_global_scale",),
)
MXFP4 = Format(("_blocks", "_scales"), _read, "_blocks", 4, result="")
