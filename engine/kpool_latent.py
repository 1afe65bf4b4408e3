"""Attention of GLM-5.3-Flash: sparse latent attention without positions. Its indexer scores k-pools.

The key of a k-pool is a mean of its tokens' keys, weighted in each value by softmax(gate + bias), where the
gate is of the token, and the bias of its place in the k-pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.latent import Indexer, LatentAttention, unrotated
from engine.paged_layers import IndexInputs, PagedLayers, SelectsTokens
from engine.token_choice import TokenChoice

ROTATED = 64
"""Values of a row that others rotate. Here they are zeros: no kernel has latents alone."""


class KPoolIndexer(Indexer):
    """Replaces the indexer of a layer."""

    def __init__(self, indexer: Any) -> None:
        super().__init__(indexer, unrotated)
        self.bias = indexer.index_kpool_compress_ape  # [kpool, dim]
        self.gate = indexer.index_kpool_compress_gate  # [dim, hidden]

    def forward(self, hidden_states: torch.Tensor, compressed: torch.Tensor, angles: Any) -> IndexInputs:
        """As Indexer's; k is [T, 2 dim], keys and behind them gates."""
        inputs = super().forward(hidden_states, compressed, angles)
        gates = functional.linear(hidden_states[0], self.gate)
        return inputs._replace(k=torch.cat((inputs.k, gates), dim=-1), sums_up=self.sum_up)

    def sum_up(self, rows: torch.Tensor) -> torch.Tensor:
        """A SumsUp."""
        keys, gates = rows.chunk(2, dim=-1)
        weights = (gates.float() + self.bias.float()).softmax(dim=1).to(keys.dtype)
        summed: torch.Tensor = (weights * keys).sum(dim=1)
        return summed


class KPoolLatentAttention(LatentAttention):
    """Replaces the attention of a layer. Layers without an indexer go on with what the one before chose."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention, unrotated)
        self.choice = TokenChoice(attention.config.index_topk, attention.config.index_kpool)
        self.indexer: nn.Module | None = (
            None if attention.indexer is None else KPoolIndexer(attention.indexer)
        )
        self._filled = ROTATED

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """As LatentAttention's."""
        del position_embeddings
        compressed = self._compressed(hidden_states)
        if self.indexer is not None:
            backend, place = paged.latent_of_layer[self.layer_idx]
            assert isinstance(backend, SelectsTokens)
            backend.select(place, self.indexer(hidden_states, compressed, None))
        return self._attend(hidden_states, self._queries(compressed), None, paged), None, None
