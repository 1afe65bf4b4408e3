"""Sparse latent attention in plain torch: the reference for tests of other backends, and the fallback."""

from __future__ import annotations

import torch

from engine.backends.kpool_keys import KPoolKeys
from engine.backends.latent_reference import TorchLatentAttention
from engine.backends.query_blocks import query_blocks
from engine.batch import ForwardBatch
from engine.paged_layers import IndexInputs
from engine.token_choice import TokenChoice
from kvcache.pool import MLAKVCache


class TorchSparseAttention(TorchLatentAttention):
    """A LatentBackend and SelectsTokens. Scores and attention are float32, one sequence after the other."""

    def __init__(self, pool: MLAKVCache, heads: int, scale: float, choice: TokenChoice) -> None:
        super().__init__(pool, heads, scale)
        self._choice = choice
        self._kpool_keys = KPoolKeys(pool, choice.kpool)
        self._chosen = torch.empty(0, 0, dtype=torch.int64)  # [T, tokens] places in each one's context

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        if self._choice.kpool > 1:
            self._kpool_keys.fill(batch)

    def select(self, place: int, inputs: IndexInputs) -> None:
        pool, choice, device = self._pool, self._choice, inputs.q.device
        pool.write_index(place, self._slots // pool.page_size, self._slots % pool.page_size, inputs.k)
        if inputs.sums_up is not None:
            self._kpool_keys.close(place, inputs.sums_up)
        longest = max((len(sequence.slots) for sequence in self._sequences), default=0)
        width = choice.kpools(longest) * choice.kpool + choice.kpool - 1
        self._chosen = torch.zeros(len(inputs.q), width, dtype=torch.int64, device=device)
        for start, end, slots in self._sequences:
            lasts = slots[choice.kpool - 1 :: choice.kpool]
            keys = pool.get_index(pool.spec.layer_ids[place], lasts)[:, : inputs.q.shape[-1]].float()
            for block in query_blocks(end - start, inputs.q.shape[1] * max(1, len(keys))):
                first = len(slots) - (end - start) + 1  # tokens that the sequence's first new one sees
                visible = torch.arange(first + block.start, first + block.stop, device=device)
                queries = slice(start + block.start, start + block.stop)
                scores = index_scores(inputs.q[queries].float(), inputs.weights[queries], keys)
                chosen = choice.tokens(self._best(scores, visible), visible)
                at = torch.arange(chosen.shape[1], device=device)
                seen = at < choice.of_visible(visible)[:, None]
                self._chosen[queries, : chosen.shape[1]] = torch.where(seen, chosen, chosen[:, :1])
                self._chosen[queries, chosen.shape[1] :] = chosen[:, :1]  # once more, where a row is longer

    def _best(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Of scores [n, k-pools] the best ones, as TokenChoice.tokens() takes them."""
        if scores.shape[1] == 0:
            return torch.zeros(len(scores), 1, dtype=torch.int64, device=scores.device)
        numbers = torch.arange(scores.shape[1], device=scores.device)
        scores.masked_fill_(numbers >= (visible // self._choice.kpool)[:, None], -torch.inf)
        return scores.topk(self._choice.kpools(scores.shape[1] * self._choice.kpool)).indices

    def _hidden(self, start: int, block: slice, seen: int) -> torch.Tensor:
        hidden = super()._hidden(start, block, seen)
        chosen = self._chosen[start + block.start : start + block.stop]
        others = torch.ones_like(hidden).scatter_(1, chosen.clamp(max=seen - 1), False)
        return hidden | others


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [n, heads, dim], weights [n, heads], keys [context, dim], float32 -> [n, context]."""
    return torch.einsum("nh,nhc->nc", weights, (q @ keys.T).relu_())
