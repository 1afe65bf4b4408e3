"""Block-sparse attention in plain torch: the reference for tests of other backends, and the fallback."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.backends.query_blocks import query_blocks
from engine.backends.torch_reference import TorchAttention
from engine.block_choice import BlockChoice, BlockInputs
from kvcache.indexed_pool import IndexedKVCache


class TorchBlockAttention(TorchAttention):
    """An AttentionBackend and AttendsBlocks. Scores are float32, one sequence after the other."""

    def __init__(self, pool: IndexedKVCache, query_heads: int, scale: float, choice: BlockChoice) -> None:
        super().__init__(pool, query_heads, scale)
        self._indexed = pool
        self._choice = choice

    def attend_blocks(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        index: BlockInputs,
    ) -> None:
        pool, page_size = self._indexed, self._page_size
        pages, offsets = self._slots // page_size, self._slots % page_size
        pool.write(place, pages, offsets, k_new, v_new)
        pool.write_index(place, pages, offsets, index.k)
        for sequence in self._sequences:
            new = sequence.end - sequence.start
            kv = self._gather(place, sequence)
            keys = pool.index[sequence.pages, place].flatten(0, 1)[sequence.keys].float()
            q_index, of_sequence, attended = (x[sequence.start : sequence.end] for x in (index.q, q, out))
            for queries in query_blocks(new, q.shape[1] * len(keys)):
                positions = torch.arange(queries.start, queries.stop, device=q.device) + len(keys) - new
                chosen = chosen_blocks(self._choice, q_index[queries], keys, positions)
                mask = self._seen(chosen, positions, len(keys), q.shape[1])
                block = of_sequence[queries].transpose(0, 1)
                attended[queries] = self._attend(block, kv, mask).transpose(0, 1)

    def _seen(self, chosen: torch.Tensor, positions: torch.Tensor, keys: int, heads: int) -> torch.Tensor:
        """bool [query heads, queries, keys]."""
        blocks = -(-keys // self._choice.tokens)
        of_blocks = torch.zeros(*chosen.shape[:2], blocks + 1, dtype=torch.bool, device=chosen.device)
        of_blocks.scatter_(-1, chosen, True)
        seen = of_blocks[..., :blocks].repeat_interleave(self._choice.tokens, -1)[..., :keys]
        seen &= torch.arange(keys, device=chosen.device) <= positions[:, None, None]
        return seen.transpose(0, 1).repeat_interleave(heads // seen.shape[1], 0)


def chosen_blocks(
    choice: BlockChoice, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """What BlockChoice.choose() returns for queries [n, heads, dim] at `positions` of a context."""
    scores = block_scores(q.float(), keys, positions, choice.tokens)
    return choice.choose(scores, positions // choice.tokens)


def block_scores(q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """The highest score of a token in each block of a context, as BlockInputs and BlockChoice have it.

    q [n, heads, dim] and keys [context, dim] float32, positions int64 [n] of the queries -> float32 [n,
    heads, blocks].
    """
    scores = q @ keys.T
    later = torch.arange(len(keys), device=keys.device) > positions[:, None]
    scores.masked_fill_(later[:, None], -torch.inf)
    filled = functional.pad(scores, (0, -len(keys) % tokens), value=-torch.inf)
    return filled.view(*filled.shape[:2], -1, tokens).amax(-1)
