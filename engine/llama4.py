"""Llama 4's mixtures and unrotated layers over a pack.

transformers lets every expert compute every token, scaled by 0 where the router did not choose it, and counts
the positions of unrotated layers from the length of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import grouped_mm_experts_forward

from engine.paged_cache import PagedCache


class Llama4Experts(nn.Module):
    """Replaces Llama4TextExperts, whose weights it takes, by experts like those of other mixtures."""

    # what transformers' grouped product asks of a module
    has_gate = is_transposed = is_concatenated = True
    has_bias = has_post_expert_norm = _is_expert_parallel = False

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn = experts.act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], [T, k] expert numbers, [T, k] weights -> [T, hidden]."""
        out: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return out

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: torch.Tensor = up * self.act_fn(gate)
        return activated


class Llama4Mixture(nn.Module):
    """Replaces Llama4TextMoe. A router's score is a factor on what goes into an expert, not on what comes
    out of it. So each pair of a token and an expert is a row of its own."""

    def __init__(self, mixture: Any) -> None:
        """`mixture`: with Llama4Experts."""
        super().__init__()
        self.router, self.experts, self.shared_expert = mixture.router, mixture.experts, mixture.shared_expert
        self._top_k: int = mixture.top_k

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[1, T, hidden] -> [T, hidden], and no logits of the router."""
        x = hidden_states.flatten(0, 1)
        values, chosen = functional.linear(x, self.router.weight).topk(self._top_k, dim=1)
        scores = values.float().sigmoid().to(x.dtype)
        rows = (x[:, None] * scores[:, :, None]).flatten(0, 1)
        experts = chosen.flatten()[:, None]
        routed = self.experts(rows, experts, torch.ones_like(experts, dtype=x.dtype))
        return self.shared_expert(x) + routed.view(-1, self._top_k, x.shape[1]).sum(1), None


class PositionedCache(PagedCache):
    """A PagedCache for layers that take positions from it."""

    def __init__(self, cache: PagedCache, positions: torch.Tensor) -> None:
        """`positions`: int64 [1, T], those of the pack."""
        super().__init__(cache.paged, cache.states)
        self._positions = positions[0]

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """int64 [T]: what transformers adds to the place of each new token to get its position."""
        del layer_idx
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)


def prepare(model: Any) -> None:
    """Make a Llama4ForCausalLM one that takes packs."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Llama4TextExperts":
                setattr(module, name, Llama4Experts(child))
    for layer in model.model.layers:
        if layer.is_moe_layer:
            layer.feed_forward = Llama4Mixture(layer.feed_forward)
        if layer.self_attn.attn_temperature_tuning and not layer.self_attn.use_rope:
            layer.register_forward_pre_hook(_add_positions, with_kwargs=True)


def _add_positions(
    _layer: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    cache = PositionedCache(keywords["past_key_values"], keywords["position_ids"])
    return positional, {**keywords, "past_key_values": cache}
