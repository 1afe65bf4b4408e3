"""Step 3.7's experts, for which transformers has no grouped products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward


class StepExperts(nn.Module):
    """Replaces Step3p7Experts, whose weights it takes. Gates are clamped after their activation."""

    # what transformers' grouped product asks of a module
    has_gate = is_concatenated = True
    has_bias = has_post_expert_norm = is_transposed = _is_expert_parallel = False
    clamps_after = True

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn = experts.act_fn
        self.limit: float = experts.limit  # infinity: there is none

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], [T, k] expert numbers, [T, k] weights -> [T, hidden]."""
        out: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return out

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: torch.Tensor = self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        return activated


def group_experts(model: nn.Module) -> None:
    """Replace all of a model's, also those whose results are summed over ranks."""
    for module in list(model.modules()):
        if type(experts := getattr(module, "experts", None)).__name__ == "Step3p7Experts":
            module.experts = StepExperts(experts)
