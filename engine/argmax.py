"""The largest score of each row, which is the token that is sampled, and whether the row is finite."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.cpu.argmax import argmax_by_kernel


class Argmax(NamedTuple):
    """Of each of N rows."""

    tokens: torch.Tensor  # int64 [N]: of equal scores the first; of a row with a NaN any
    is_finite: torch.Tensor  # bool [N]


def argmax(scores: torch.Tensor) -> Argmax:
    """Of scores [N, vocab], on any device. Nothing waits for the device."""
    found = argmax_by_kernel(scores) if scores.device.type == "cpu" else None
    return argmax_by_torch(scores) if found is None else Argmax(*found)


def argmax_by_torch(scores: torch.Tensor) -> Argmax:
    """The same, where there is no kernel."""
    # The sum of a row is finite only if all of its scores are. It takes a tenth of the time of argmax,
    # and aminmax takes four times as long as argmax.
    return Argmax(scores.argmax(-1), scores.sum(-1, dtype=torch.float32).isfinite())
