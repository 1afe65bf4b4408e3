"""Sparse latent attention in plain torch: the reference for tests of other backends, and the fallback."""

from __future__ import annotations

import torch

from engine.backends.latent_reference import TorchLatentAttention, later
from engine.backends.query_blocks import query_blocks
from engine.paged_layers import IndexInputs
from kvcache.pool import MLAKVCache


class TorchSparseAttention(TorchLatentAttention):
    """A LatentBackend and SelectsTokens. Scores and attention are float32, one sequence after the other."""

    def __init__(self, pool: MLAKVCache, heads: int, scale: float, top: int) -> None:
        super().__init__(pool, heads, scale)
        self._top = top
        self._chosen = torch.empty(0, 0, dtype=torch.int64)  # [T, at most top] places in each one's context

    def select(self, place: int, inputs: IndexInputs) -> None:
        layer, pool = self._pool.spec.layer_ids[place], self._pool
        pool.write_index(place, self._slots // pool.page_size, self._slots % pool.page_size, inputs.k)
        longest = max((len(sequence.slots) for sequence in self._sequences), default=0)
        self._chosen = torch.zeros(
            len(inputs.q), min(self._top, longest), dtype=torch.int64, device=inputs.q.device
        )
        for start, end, slots in self._sequences:
            keys = pool.get_index(layer, slots).float()  # [context, dim]
            for block in query_blocks(end - start, inputs.q.shape[1] * len(keys)):
                seen = len(keys) - (end - start) + block.stop
                queries = slice(start + block.start, start + block.stop)
                scores = index_scores(inputs.q[queries].float(), inputs.weights[queries], keys[:seen])
                scores.masked_fill_(later(len(scores), seen, scores.device), -torch.inf)
                best = scores.topk(min(self._top, seen)).indices
                self._chosen[queries, : best.shape[1]] = best
                self._chosen[queries, best.shape[1] :] = best[:, :1]  # once more, where a row is longer

    def _hidden(self, start: int, block: slice, seen: int) -> torch.Tensor:
        hidden = super()._hidden(start, block, seen)
        chosen = self._chosen[start + block.start : start + block.stop]
        others = torch.ones_like(hidden).scatter_(1, chosen.clamp(max=seen - 1), False)
        return hidden | others


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [n, heads, dim], weights [n, heads], keys [context, dim], float32 -> [n, context]."""
    return torch.einsum("nh,nhc->nc", weights, (q @ keys.T).relu_())
