"""NVFP4: e2m1 numbers with an fp8 scale for 16 of them, and a float32 factor for the whole weight; and what
else NVIDIA's Model Optimizer stores, fp8 with one scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.base import Format, Parts, row_blocks
from engine.checkpoint.mxfp4 import E2M1
from engine.checkpoint.scaled import scaled_format
from engine.checkpoint.stored import StoredTensor

_BLOCK = 16  # inputs that share a scale


@dataclass(frozen=True)
class Nvfp4Matrix:
    """A StoredMatrix of 16 n inputs: codes uint8 [outputs, n, 8], the low half of a byte first, scales e4m3
    [outputs, n], and a float32 factor, a tensor without dimensions."""

    codes: torch.Tensor
    scales: torch.Tensor
    factor: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.scales.shape[0], _BLOCK * self.scales.shape[1]

    def rows(self, rows: slice | torch.Tensor) -> Nvfp4Matrix:
        """Some of its outputs."""
        return Nvfp4Matrix(self.codes[rows], self.scales[rows], self.factor)

    def columns(self, columns: slice) -> Nvfp4Matrix | None:
        """Neighbouring inputs; None if they begin or end within a block."""
        if columns.start % _BLOCK or columns.stop % _BLOCK:
            return None
        blocks = slice(columns.start // _BLOCK, columns.stop // _BLOCK)
        return Nvfp4Matrix(self.codes[:, blocks], self.scales[:, blocks], self.factor)

    def owned(self) -> Nvfp4Matrix:
        """A copy."""
        return Nvfp4Matrix(self.codes.clone(), self.scales.clone(), self.factor.clone())

    def to(self, device: torch.device) -> Nvfp4Matrix:
        """The same on a device."""
        return Nvfp4Matrix(self.codes.to(device), self.scales.to(device), self.factor.to(device))

    def dequantise(self, into: torch.Tensor) -> None:
        """Write its numbers to a tensor of the same shape."""
        values = torch.tensor(E2M1, device=self.codes.device)
        for part in row_blocks(*self.shape):
            codes, scales = self.codes[part], self.scales[part].float() * self.factor
            halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
            into[part] = (values[halves.int()] * scales[..., None]).flatten(1)


def _matrix(numbers: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> Nvfp4Matrix:
    if numbers.dtype != torch.uint8 or numbers.ndim != 2:
        raise ValueError(f"numbers of 4 bits are {numbers.dtype} {tuple(numbers.shape)}, not rows of bytes")
    rows, width = numbers.shape
    expected = (rows, width * 2 // _BLOCK)
    if scales.dtype != torch.float8_e4m3fn or scales.shape != expected or width * 2 % _BLOCK:
        raise ValueError(f"scales are {scales.dtype} {tuple(scales.shape)} for {rows} x {width} bytes")
    if factor.numel() != 1:
        raise ValueError(f"the factor of the whole weight has the shape {tuple(factor.shape)}")
    return Nvfp4Matrix(numbers.view(rows, -1, _BLOCK // 2), scales, factor.float().reshape(()))


_FP8 = scaled_format(".weight_scale", None)


def _read_either(parts: Parts, dtype: torch.dtype) -> StoredTensor:
    """Of Model Optimizer: bytes are pairs of 4 bits. Its factor multiplies."""
    if parts[".weight"].dtype != torch.uint8:
        return _FP8.read(parts, dtype)
    if ".weight_scale_2" not in parts:
        raise ValueError("numbers of 4 bits have no .weight_scale_2")
    matrix = _matrix(parts[".weight"], parts[".weight_scale"], parts[".weight_scale_2"])
    return StoredTensor([[matrix]], dtype, experts=False)


def _read_packed(parts: Parts, dtype: torch.dtype) -> StoredTensor:
    """Of compressed-tensors: its factor divides."""
    factor = 1 / parts[".weight_global_scale"].float()
    matrix = _matrix(parts[".weight_packed"], parts[".weight_scale"], factor)
    return StoredTensor([[matrix]], dtype, experts=False)


MODELOPT = replace(_FP8, read=_read_either, optional=(*_FP8.optional, ".weight_scale_2"), pairs="U8")
NVFP4_PACKED = Format(
    (".weight_packed", ".weight_scale", ".weight_global_scale"),
    _read_packed,
    ".weight_packed",
    4,
    optional=(".input_global_scale",),
)
