"""Layers that keep a state, over one sequence in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.states import CONV, RECURRENT


def check_cuts(
    mixer: Any,
    states: dict[str, torch.Tensor],
    x: torch.Tensor,
    has_state: bool,
    cuts: Sequence[Sequence[int]],
) -> None:
    """However tokens x [T, hidden] are cut, no bit of the outputs and of the states differs. The sequence has
    the states in slot 1, which become zeros if it has none, and writes to slot 2."""
    if not has_state:
        for tensor in states.values():
            tensor[1] = 0
    slots = torch.tensor([1]), torch.tensor([2])

    def run(lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        own, out = {name: tensor.clone() for name, tensor in states.items()}, []
        read = slots[0] if has_state else None
        for chunk in torch.split(x, list(lengths)):
            out.append(mixer.run(chunk, own, read, slots[1]))
            read = slots[1]
        return torch.cat(out), own[CONV][2], own[RECURRENT][2]

    whole = run([len(x)])
    for lengths in cuts:
        for got, want in zip(run(lengths), whole, strict=True):
            assert torch.equal(got, want)
    zeroed = {name: tensor.clone() for name, tensor in states.items()}
    assert torch.equal(mixer.run(x, zeroed, slots[0], slots[1]), whole[0])
