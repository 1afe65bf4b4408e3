"""Values of a checkpoint's weights, taken while they are read, by which one model is told from another.

Two fine-tunes of one model have equal shapes and must not exchange KV. To read all values once more would
double the time to load.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch

from engine.checkpoint.stored import StoredTensor

_VALUES = 64  # of each weight


class WeightSamples:
    """Evenly spaced values of every weight that has been read. The same for each rank of a worker, whatever
    part of a weight it reads."""

    def __init__(self) -> None:
        self._described: dict[str, bytes] = {}

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Take those of a weight that is in memory."""
        places = _places(list(weight.shape))
        if isinstance(weight, StoredTensor):
            values = weight.numbers_at(places)
        else:
            values = weight.flatten()[:: places.step]
        self._keep(name, list(weight.shape), weight.dtype, values)

    def take_from_file(self, name: str, weight: Any) -> None:
        """Take those of a safetensors slice, and read no others."""
        shape: list[int] = weight.get_shape()
        spots = np.stack(np.unravel_index(np.array(_places(shape)), shape), axis=-1).tolist()
        values = torch.cat([weight[tuple(slice(at, at + 1) for at in spot)].view(1) for spot in spots])
        self._keep(name, shape, values.dtype, values)

    def digest_into(self, digest: hashlib._Hash) -> None:
        """Add all that was taken, by name."""
        for name, described in sorted(self._described.items()):
            digest.update(name.encode() + described)

    def _keep(self, name: str, shape: list[int], dtype: torch.dtype, values: torch.Tensor) -> None:
        self._described[name] = f" {shape} {dtype}".encode() + values.float().numpy().tobytes()


def _places(shape: list[int]) -> range:
    """In the flat tensor."""
    count = math.prod(shape)
    return range(0, count, max(1, count // _VALUES))
