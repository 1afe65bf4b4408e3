"""A mixture of experts that reads only the weights of the experts that its tokens selected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from engine.cpu.linear import GROUP, Pack, packable

CLAMPED = "GptOssExperts"
MODELS = (
    "MixtralExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
    "Qwen3NextExperts",
    "DeepseekV2Experts",
    "DeepseekV3Experts",
    CLAMPED,
)
"""The transformers classes that PackedExperts computes."""


def fusible(experts: Any) -> bool:
    """Whether this module's weights can be packed and its activation function is computed here."""
    gate_up, down = _weights(experts)
    return (
        packable(gate_up[0])
        and packable(down[0])
        and down.shape[1] % GROUP == 0
        and (type(experts).__name__ == CLAMPED or isinstance(experts.act_fn, nn.SiLU | SiLUActivation))
    )


class PackedExperts(nn.Module):
    """All experts in two packs, one expert after the other. Sums are float32 up to the final result."""

    def __init__(self, experts: Any, weight_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        gate_up, down = _weights(experts)
        count, self._width, self._hidden = gate_up.shape
        self._gate_up, self._down = _pack(gate_up, weight_dtype), _pack(down, weight_dtype)
        self._gate_up_bias: list[torch.Tensor | None] = [None] * count
        self._down_bias: list[torch.Tensor | None] = [None] * count
        self._gated: Callable[[torch.Tensor], torch.Tensor] = _swiglu
        if type(experts).__name__ == CLAMPED:
            self._gate_up_bias = list(experts.gate_up_proj_bias.detach().float())
            self._down_bias = list(experts.down_proj_bias.detach().float())
            self._gated = partial(_clamped_swiglu, alpha=experts.alpha, limit=experts.limit)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], [T, k] expert numbers, [T, k] weights -> [T, hidden] in bfloat16."""
        out = torch.zeros(hidden_states.shape)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            tokens, places = torch.where(top_k_index == expert)
            both = self._gate_up.product(
                hidden_states[tokens], expert * self._width, self._width, self._gate_up_bias[expert]
            )
            inner = self._gated(both).bfloat16()
            result = self._down.product(inner, expert * self._hidden, self._hidden, self._down_bias[expert])
            out.index_add_(0, tokens, result * top_k_weights[tokens, places, None].float())
        return out.to(hidden_states.dtype)


def _weights(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights as [experts, 2 x inner, hidden] and [experts, hidden, inner], for both storage orders."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    return (gate_up.transpose(1, 2), down.transpose(1, 2)) if experts.is_transposed else (gate_up, down)


def _pack(weights: torch.Tensor, dtype: torch.dtype) -> Pack:
    count, outputs, inputs = weights.shape
    pack = Pack(count * outputs, inputs, dtype)
    for expert, weight in enumerate(weights):
        pack.put(weight, expert * outputs // GROUP)
    return pack


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    """[T, 2 x inner], the gates before the ups -> [T, inner]."""
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _clamped_swiglu(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss: gates and ups alternate, both are clamped, and 1 is added to an up."""
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
