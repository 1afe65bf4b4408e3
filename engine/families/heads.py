"""Projections onto the vocabulary whose logits a model changes afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class CappedHead(nn.Module):
    """A projection onto the vocabulary whose logits x become cap tanh(x / cap)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head = head
        self._cap = cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        logits: torch.Tensor = self.head(hidden)
        return torch.tanh(logits / self._cap) * self._cap


class ScaledHead(nn.Module):
    """A projection onto the vocabulary whose logits are multiplied by a factor."""

    def __init__(self, head: nn.Module, factor: float) -> None:
        super().__init__()
        self.head = head
        self._factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        logits: torch.Tensor = self.head(hidden) * self._factor
        return logits


class WideHead(nn.Module):
    """A projection onto the vocabulary in a dtype of its own."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self._dtype = dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        logits: torch.Tensor = self.head(hidden.to(self._dtype))
        return logits


def widen_inputs(model: Any) -> None:
    """To the dtype of the projection, which transformers keeps in float32."""
    [dtype] = {parameter.dtype for parameter in model.lm_head.parameters()}
    model.lm_head = WideHead(model.lm_head, dtype)


def cap_logits(model: Any) -> None:
    """As `final_logit_softcapping` of the model's config says."""
    if model.config.final_logit_softcapping is not None:
        model.lm_head = CappedHead(model.lm_head, model.config.final_logit_softcapping)


def divide_logits(model: Any) -> None:
    """By `logits_scaling` of the model's config, as Granite's are."""
    scale_logits(model, 1 / model.config.logits_scaling)


def multiply_logits(model: Any) -> None:
    """By `logits_scaling` of the model's config, as HyperCLOVA X's are."""
    scale_logits(model, model.config.logits_scaling)


def apply_logit_scale(model: Any) -> None:
    """By `logit_scale` of the model's config, as Cohere's are."""
    scale_logits(model, model.config.logit_scale)


def scale_logits(model: Any, factor: float) -> None:
    """Multiply all logits."""
    model.lm_head = ScaledHead(model.lm_head, factor)
