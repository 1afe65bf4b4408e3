"""Gemma 4's mixtures of experts, which are added to a dense MLP, as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Gemma4Mixture(nn.Module):
    """The dense MLP, router and experts of a decoder layer with their norms. transformers' modules compute
    them.

    All three read the residual, each through a norm of its own.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.before_mlp, self.mlp = layer.pre_feedforward_layernorm, layer.mlp
        self.after_mlp = layer.post_feedforward_layernorm_1
        self.router = layer.router
        self.before_experts, self.experts = layer.pre_feedforward_layernorm_2, layer.experts
        self.after_experts = layer.post_feedforward_layernorm_2

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden] of the residual -> the same shape: what is added to it after one more norm."""
        dense = self.after_mlp(self.mlp(self.before_mlp(hidden)))
        rows = hidden[0]
        _, factors, chosen = self.router(rows)
        mixed = self.after_experts(self.experts(self.before_experts(rows), chosen, factors))
        result: torch.Tensor = dense + mixed
        return result
