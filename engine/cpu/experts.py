"""A mixture of experts that reads only the experts its tokens chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from engine.cpu.linear import GROUP, Pack, packable

MODELS = ("Qwen3MoeExperts", "Qwen3NextExperts", "DeepseekV2Experts", "DeepseekV3Experts")
"""The transformers classes that PackedExperts computes."""


def fusible(experts: Any) -> bool:
    """Whether this module's weights can be packed and its activation is the one computed here."""
    gate_up, down = (
        experts.gate_up_proj,
        experts.down_proj,
    )  # [experts, 2 x inner, hidden], [.., hidden, inner]
    return (
        packable(gate_up[0])
        and packable(down[0])
        and down.shape[1] % GROUP == 0
        and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
    )


class PackedExperts(nn.Module):
    """All experts in two packs, one expert after the other; sums are float32 until the last."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        count, self._width, hidden = experts.gate_up_proj.shape
        self._hidden = hidden
        self._gate_up = Pack(count * self._width, hidden)
        self._gate_up.put(experts.gate_up_proj.reshape(-1, hidden))
        self._down = Pack(count * hidden, self._width // 2)
        self._down.put(experts.down_proj.reshape(-1, self._width // 2))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], [T, k] expert numbers, [T, k] weights -> [T, hidden] in bfloat16."""
        out = torch.zeros(hidden_states.shape)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            tokens, places = torch.where(top_k_index == expert)
            both = self._gate_up.product(hidden_states[tokens], expert * self._width, self._width)
            gate, up = both.chunk(2, dim=-1)
            inner = (nn.functional.silu(gate) * up).bfloat16()
            result = self._down.product(inner, expert * self._hidden, self._hidden)
            out.index_add_(0, tokens, result * top_k_weights[tokens, places, None].float())
        return out.to(hidden_states.dtype)
