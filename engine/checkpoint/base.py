"""What the quantised formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.checkpoint.stored import StoredTensor

_ELEMENTS_AT_ONCE = 1 << 18  # of a weight that are in float32 at the same time: they stay in the CPU's cache

Parts = Mapping[str, torch.Tensor]
"""The stored tensors of one weight, by the suffix of their names."""


class Stored(Protocol):
    """A tensor that is read by `stored[...]`, as safetensors' slices are; transformers reads it so."""

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        ...

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Format:
    """How one quantised weight is stored: as several tensors whose names have a stem in common.

    `read` gives the weight, whose dtype is the one that it is given. It raises ValueError for tensors that do
    not fit together.
    """

    parts: tuple[str, ...]  # suffixes of the tensors. A name with the first one belongs to a quantised weight
    read: Callable[[Parts, torch.dtype], StoredTensor]
    numbers: str  # suffix of the tensor that has a number for each of the weight's, the others few
    bits: int  # of such a number
    optional: tuple[str, ...] = ()  # suffixes of tensors that a weight may have, too
    renamed: tuple[tuple[str, str], ...] = ()  # suffixes that some checkpoints have instead of one of `parts`
    pairs: str | None = None  # safetensors' name of a dtype of which each byte has two numbers of 4 bits
    result: str = ".weight"  # suffix of the name under which transformers knows the weight


def row_blocks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of all rows. Each begins at a multiple of `multiple`, and is small enough to be in float32."""
    step = max(1, _ELEMENTS_AT_ONCE // max(1, columns) // multiple) * multiple
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def unpack(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [rows, n] -> int32 [rows, n * 32 / bits]: the numbers from 0 to 2^bits - 1 in each word.

    Place i of a word's numbers comes from its bits [bits * order[i], bits * order[i] + bits); without an
    order the lowest bits come first.
    """
    if packed.dtype != torch.int32 or packed.ndim != 2:
        raise ValueError(
            f"packed integers are {packed.dtype} {tuple(packed.shape)}, not int32 in two dimensions"
        )
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32)
    numbers: torch.Tensor = (packed[..., None] >> places * bits) & (2**bits - 1)
    return numbers.flatten(1)
