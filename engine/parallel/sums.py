"""Puts sums over the ranks into a model that is one rank's part."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from engine.layer_classes import EXPERTS, UNGATED_EXPERTS
from engine.parallel.group import RankGroup
from engine.parallel.shard import is_whole

_BY_INPUTS = ("o_proj", "o_b_proj", "down_proj")
_BY_INPUTS_IN_MLPS = ("c_proj", "fc2", "output_linear")  # elsewhere such a name is of something else
_MLP = re.compile(r"layers\.\d+\.\w*mlp$")
_OF_ALL_HEADS = (
    *("FlexOlmoRMSNorm", "MiniMaxM2RMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm", "OlmoHybridRMSNorm"),
)
"""transformers classes of norms that, as q_norm and k_norm, go over all heads at once."""


class SummedLinear(nn.Module):
    """A projection that is divided by inputs: its outputs are summed over the ranks, then comes its bias."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.bias = linear.bias
        self.linear = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        self.linear.weight = linear.weight
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """Of this rank."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs of this rank] -> [..., outputs]."""
        return self.finished(self.linear(x))

    def finished(self, summand: torch.Tensor) -> torch.Tensor:
        """The result, of a product with `weight`. May overwrite it."""
        self._group.sum(summand)
        return summand if self.bias is None else summand + self.bias


class SummedExperts(nn.Module):
    """The experts of a mixture, each divided: what they return is summed over the ranks."""

    def __init__(self, experts: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.experts = experts
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the experts take and return."""
        out: torch.Tensor = self.experts(*args, **kwargs)
        self._group.sum(out)
        return out


class DividedNorm(nn.Module):
    """An RMSNorm over the queries, or the keys, of all heads, of which each rank has its own. A KV head that
    several ranks have counts as often as any other."""

    def __init__(self, norm: Any, group: RankGroup) -> None:
        super().__init__()
        self.weight: torch.Tensor = norm.weight  # of this rank's heads
        self._eps = float(norm.variance_epsilon)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width of this rank's heads] -> the same shape."""
        values = x.float()
        squares = values.square().sum(-1, keepdim=True)
        self._group.sum(squares)
        mean = squares / (x.shape[-1] * self._group.size)
        return (self.weight * (values * torch.rsqrt(mean + self._eps))).to(x.dtype)


def is_divided(model: nn.Module) -> bool:
    """Whether the model has sums over ranks."""
    return any(isinstance(module, SummedLinear) for module in model.modules())


def put_sums(model: Any, group: RankGroup) -> None:
    """Sum what attention and MLPs return, and what norms of all heads need, in place. Before modules are
    replaced by faster ones."""
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if is_whole(name, model.config):
            continue
        by_inputs = own in _BY_INPUTS or (own in _BY_INPUTS_IN_MLPS and _MLP.search(parent) is not None)
        if by_inputs and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), own, SummedLinear(module, group))
        elif type(module).__name__ in (*EXPERTS, *UNGATED_EXPERTS):
            setattr(model.get_submodule(parent), own, SummedExperts(module, group))
        elif own in ("q_norm", "k_norm") and type(module).__name__ in _OF_ALL_HEADS:
            setattr(model.get_submodule(parent), own, DividedNorm(module, group))
