"""A mixture of experts whose weights stay as the checkpoint stored them, on a GPU.

The host does not learn how many tokens an expert has: tokens are sorted into tiles on the device, and the
number of tiles is the most that there can be. So its steps can be recorded on every GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from engine.cuda.stored_product import Products, StoredProduct
from engine.cuda.tiles import tile_rows
from engine.layer_classes import CLAMPED, EXPERTS, activation_of, clamps_first, limit_of, sharpness_of


class StoredExperts(nn.Module):
    """Replaces the experts of a mixture. What an expert adds is rounded to the dtype; sums are float32."""

    @classmethod
    def of(cls, experts: Any, products: Products) -> StoredExperts | None:
        """None if their weights are not stored, or in a format without a kernel."""
        if type(experts).__name__ not in EXPERTS or not clamps_first(experts):
            return None
        gate_up, down = products.stored(experts.gate_up_proj), products.stored(experts.down_proj)
        return None if gate_up is None or down is None else cls(experts, gate_up, down)

    def __init__(self, experts: Any, gate_up: StoredProduct, down: StoredProduct) -> None:
        super().__init__()
        self._gate_up, self._down = gate_up, down
        self._count = len(experts.gate_up_proj)
        self._limit: float = limit_of(experts)
        self._clamped = type(experts).__name__ == CLAMPED
        self._alpha = sharpness_of(experts)
        if self._clamped:
            self.gate_up_bias, self.down_bias = experts.gate_up_proj_bias, experts.down_proj_bias
        self._act: Any = activation_of(experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden], [T, k] expert numbers, [T, k] weights -> [T, hidden]."""
        tokens, chosen = top_k_index.shape
        experts, pairs = top_k_index.flatten(), tokens * chosen
        rows, tiles = tiles_of(experts, self._count)
        gate_up = self._gate_up.by_expert(hidden_states, rows, tiles, chosen, pairs)
        activated = self._activate(gate_up, experts)
        out = self._down.by_expert(activated, rows, tiles, 1, pairs)
        if self._clamped:
            out = out + self.down_bias[experts]
        weighted = out.view(tokens, chosen, -1).float() * top_k_weights[..., None].float()
        return weighted.sum(1).to(hidden_states.dtype)

    def _activate(self, gate_up: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if self._clamped:
            gate_up = gate_up + self.gate_up_bias[experts]
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        if self._limit < math.inf:
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        if self._alpha is not None:
            return (up + 1) * gate * torch.sigmoid(gate * self._alpha)
        activated: torch.Tensor = self._act(gate) * up
        return activated


def tiles_of(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a token and an expert, [pairs] numbers below `count`, in tiles of one expert each.

    Returns rows, int32 [tiles x size]: pairs, or -1 where a tile has none; and the expert of each tile, int32
    [tiles], or -1. Shapes depend on shapes alone.
    """
    pairs = len(experts)
    size = tile_rows(-(-pairs // count))
    most = pairs // size + min(pairs, count)
    of_expert = torch.zeros(count, dtype=torch.int64, device=experts.device)
    of_expert = of_expert.scatter_add(0, experts, torch.ones_like(experts))
    tiles = (of_expert + size - 1) // size
    ends = tiles.cumsum(0)
    first_tile = ends - tiles
    first_pair = of_expert.cumsum(0) - of_expert
    order = experts.argsort(stable=True)
    sorted_experts = experts[order]
    number = torch.arange(pairs, device=experts.device) - first_pair[sorted_experts]  # within its expert
    rows = torch.full((most * size,), -1, dtype=torch.int32, device=experts.device)
    rows = rows.scatter(0, first_tile[sorted_experts] * size + number, order.int())
    tile = torch.arange(most, device=experts.device)
    expert = torch.searchsorted(ends, tile, right=True)
    return rows, torch.where(tile < ends[-1], expert, -1).int()
