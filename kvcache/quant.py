"""Quantised KV: how keys, values and latents are stored in fewer bits, and the conversions in torch.

    auto       as the model computes them
    fp8_e4m3   one byte a value, scale 1
    fp8_e5m2   one byte a value, scale 1
    fp4_e2m1   half a byte a value, and for each 16 values along a row one e4m3 scale byte

A value is rounded to the nearest one, ties to even; a value that is too large becomes the largest; a NaN
stays a NaN. Stored values are exact in bfloat16, so reading does not round. fp8's scale is 1: it needs no
calibration, keys and values of the models that we serve are within e4m3's 2^-9 .. 448, and two workers would
have to agree on a scale per tensor.

`engine/cpu/kv_format.h` does the same in C++, bit for bit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from common.errors import ConfigError

BLOCK = 16
"""Values of fp4_e2m1 that share a scale."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIXTH = 1 / _E2M1[-1]


class KVFormat(StrEnum):
    """The values of `--kv-cache-dtype`."""

    AUTO = "auto"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP4_E2M1 = "fp4_e2m1"

    @property
    def element(self) -> torch.dtype | None:
        """What a pool's tensor holds; None for AUTO: the model's dtype."""
        return _ELEMENTS.get(self)

    @property
    def description(self) -> str:
        """The name in a layout; it includes the policy for scales."""
        return _DESCRIPTIONS[self]

    def row_bytes(self, values: int) -> int:
        """Bytes of a quantised row of `values`, scales included."""
        assert self is not KVFormat.AUTO
        return values // 2 + values // BLOCK if self is KVFormat.FP4_E2M1 else values

    def check_row(self, values: int) -> None:
        """Raises ConfigError for a row that this format cannot hold."""
        if self is KVFormat.FP4_E2M1 and values % BLOCK:
            raise ConfigError(
                "kv_cache_dtype",
                f"{self} stores blocks of {BLOCK} values, and this model's rows have {values}",
                f"use {KVFormat.FP8_E4M3}",
            )


_ELEMENTS = {
    KVFormat.FP8_E4M3: torch.float8_e4m3fn,
    KVFormat.FP8_E5M2: torch.float8_e5m2,
    KVFormat.FP4_E2M1: torch.uint8,
}
_DESCRIPTIONS = {
    KVFormat.FP8_E4M3: "fp8_e4m3:scale=1",
    KVFormat.FP8_E5M2: "fp8_e5m2:scale=1",
    KVFormat.FP4_E2M1: f"fp4_e2m1:block={BLOCK}:scale=e4m3",
}


class QuantisedRows:
    """Rows of `dim` values in memory of whole tiles: `[..., page_size]` rows, reached by their index.

    A tile of fp4 is `[data | scales]`: the data of all its rows and then their scales.
    """

    def __init__(self, tiles: torch.Tensor, form: KVFormat, page_size: int, dim: int) -> None:
        """`tiles`: uint8 `[..., page_size * form.row_bytes(dim)]`, written and read in place."""
        assert tiles.dtype == torch.uint8
        assert tiles.shape[-1] == page_size * form.row_bytes(dim)
        self._form = form
        data_bytes = dim // 2 if form is KVFormat.FP4_E2M1 else dim
        self._data = _split(tiles[..., : page_size * data_bytes], page_size)
        self._scales: torch.Tensor | None = None
        if form is KVFormat.FP4_E2M1:
            self._scales = _split(tiles[..., page_size * data_bytes :], page_size)

    def write(self, index: Any, values: torch.Tensor, first: int = 0) -> None:
        """`values` `[..., n]` of any float dtype to the rows that `index` selects of `[..., page_size]`, from
        the value `first` of a row on."""
        end = first + values.shape[-1]
        if self._scales is None:
            self._data[..., first:end][index] = to_fp8(values, self._form).view(torch.uint8)
        else:
            data, scales = to_fp4(values)
            self._data[..., first // 2 : end // 2][index] = data
            self._scales[..., first // BLOCK : end // BLOCK][index] = scales

    def read(self, index: Any) -> torch.Tensor:
        """The selected rows, `[..., dim]`, copied to bfloat16."""
        if self._scales is None:
            element = self._form.element
            assert element is not None
            codes: torch.Tensor = self._data[index]
            return codes.view(element).bfloat16()
        return from_fp4(self._data[index], self._scales[index])


def to_fp8(values: torch.Tensor, form: KVFormat) -> torch.Tensor:
    """To `form.element`. A value that is too large becomes the largest number, not torch's NaN or
    infinity."""
    element = form.element
    assert element in (torch.float8_e4m3fn, torch.float8_e5m2)
    most = torch.finfo(element).max
    return values.float().clamp(-most, most).to(element)


def to_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[..., dim]` -> (data uint8 `[..., dim / 2]`, even values in the low halves; scales `[..., dim / 16]`).

    A block's scale maps its largest magnitude to 6, the largest e2m1 number, and is never 0.
    """
    blocks = _split(values.float(), values.shape[-1] // BLOCK)
    magnitude = blocks.abs()
    scales = to_fp8(magnitude.amax(-1) * _SIXTH, KVFormat.FP8_E4M3).view(torch.uint8).clamp(min=1)
    divisor = scales.view(torch.float8_e4m3fn).float()[..., None]
    magnitude /= divisor
    code = torch.zeros(magnitude.shape, dtype=torch.uint8, device=values.device)
    for number in range(1, len(_E2M1)):  # the border below each number; a tie goes to the even code
        border = (_E2M1[number - 1] + _E2M1[number]) / 2
        code += magnitude > border if number % 2 else magnitude >= border
    code |= torch.signbit(blocks).to(torch.uint8) << 3
    even, odd = _split(code.flatten(-2), values.shape[-1] // 2).unbind(-1)
    return even | odd << 4, scales


def from_fp4(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `to_fp4` gave, in bfloat16, exactly."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    numbers = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16, device=data.device)
    blocks = _split(numbers[codes.int()], scales.shape[-1])
    return (blocks * scales.view(torch.float8_e4m3fn).bfloat16()[..., None]).flatten(-2)


def _split(values: torch.Tensor, parts: int) -> torch.Tensor:
    """`[..., n]` -> `[..., parts, n / parts]`, a view."""
    return values.view(*values.shape[:-1], parts, values.shape[-1] // parts)
