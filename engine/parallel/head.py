"""The projection onto the vocabulary, divided among ranks by tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.parallel.group import RankGroup


class DividedHead(nn.Module):
    """Computes the logits of this rank's tokens, and has those of all. Every rank must project the same
    rows at the same time."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        """`linear` has the rows of this rank's tokens."""
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        return self._group.gather(self.linear(hidden))


def divide_head(model: Any, group: RankGroup) -> None:
    """Leave this rank its part of `model.lm_head`, in place. A tied one stays a part of the embedding, which
    is whole. A vocabulary that does not divide stays whole, and only rank 0 projects onto it."""
    whole = model.lm_head
    if whole.out_features % group.size:
        return
    rows = whole.out_features // group.size
    first = group.rank * rows
    linear = nn.Linear(whole.in_features, rows, bias=whole.bias is not None, device="meta")
    tied = whole.weight is model.get_input_embeddings().weight
    for name, values in whole.named_parameters():
        own = values.detach()[first : first + rows]
        setattr(linear, name, nn.Parameter(own if tied else own.clone(), requires_grad=False))
    model.lm_head = DividedHead(linear, group)


def is_divided_head(head: nn.Module) -> bool:
    """Whether all ranks take part in it. A family may have put something around it."""
    return any(isinstance(module, DividedHead) for module in head.modules())
