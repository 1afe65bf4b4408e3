"""How a checkpoint stored the weights of a loaded model, so that they can be kept in as few bits.

Transformers is given weights that are dequantised. Kernels that multiply with fp8 or MXFP4 recover the codes
from them: those of MXFP4 from the weights alone, those of fp8 with the scales, which are kept here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
"""Parameters that transformers makes of many matrices of a checkpoint."""
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class StoredMatrix:
    """The format of one matrix [outputs, inputs] in the checkpoint."""

    form: Literal["fp8", "mxfp4"]
    scales: torch.Tensor | None = None  # of fp8: float32, one for each block of `block` outputs and inputs
    block: tuple[int, int] = (1, 1)

    def input_scales(self, outputs: int, inputs: int, width: int) -> torch.Tensor | None:
        """Of fp8, float32 [outputs, inputs / width rounded up]: one for each `width` inputs of an output.

        None if one scale is not enough for that.
        """
        assert self.scales is not None
        count = -(-inputs // width)
        if self.block[1] >= inputs:
            columns = self.scales.expand(-1, count)
        elif self.block[1] % width == 0:
            columns = self.scales.repeat_interleave(self.block[1] // width, 1)[:, :count]
        else:
            return None
        return columns.repeat_interleave(self.block[0], 0)[:outputs].contiguous()


class StoredWeights:
    """The stored formats of parameters. A parameter that is freed is forgotten."""

    def __init__(self, matrices: Iterable[tuple[torch.Tensor, tuple[StoredMatrix, ...]]] = ()) -> None:
        """Parameters, and how their matrices are stored, in the order of their experts and outputs."""
        self._matrices: Any = WeakIdKeyDictionary()
        self._matrices.update(matrices)
        self.kept: set[str] = set()  # the formats that packs were made of

    def of(self, parameter: torch.Tensor, count: int) -> tuple[StoredMatrix | None, ...]:
        """The formats of a parameter's `count` matrices. None: in the model's dtype, or not known."""
        found: tuple[StoredMatrix, ...] = self._matrices.get(parameter, ())
        if len(found) == 1 and found[0].scales is None:  # stored as one
            return found * count
        return found if len(found) == count else (None,) * count


def find_stored(model: nn.Module, stored: Mapping[str, StoredMatrix]) -> StoredWeights:
    """The formats of `model`'s parameters, from those of the checkpoint's weights by name.

    A parameter with another name than in the checkpoint is left out, and so are experts that do not
    all have a format.
    """
    found = []
    for name, parameter in model.named_parameters():
        names = [name] if name in stored else _names_of_experts(name, parameter)
        if names and all(each in stored for each in names):
            found.append((parameter, tuple(stored[each] for each in names)))
    return StoredWeights(found)


def _names_of_experts(name: str, parameter: torch.Tensor) -> list[str]:
    experts = _EXPERTS.fullmatch(name)
    if experts is None:
        return []
    stem, kind = experts.groups()
    numbers = range(len(parameter))
    return [f"{stem}.{expert}.{part}.weight" for expert in numbers for part in _PROJECTIONS[kind]]
