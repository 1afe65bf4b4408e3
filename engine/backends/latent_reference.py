"""Latent attention in plain torch: the reference for tests of other backends, and the fallback."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.backends.query_blocks import query_blocks
from engine.batch import ForwardBatch
from engine.device_copies import upload
from kvcache.pool import MLAKVCache


class _Sequence(NamedTuple):
    start: int  # its new tokens are [start, end) of the pack
    end: int
    slots: torch.Tensor  # int64 [context]


class TorchLatentAttention:
    """A LatentBackend that gathers each sequence's rows and attends in float32, one sequence after the other.

    It uses float32 even if the rows are bfloat16, because a score sums kv_lora_rank + rope_dim products,
    several times as many as a head of the expanded form.
    """

    def __init__(self, pool: MLAKVCache, heads: int, scale: float) -> None:
        del heads  # all heads attend to the same rows
        self._pool = pool
        self._scale = scale
        self._slots = torch.empty(0, dtype=torch.int64)
        self._sequences: list[_Sequence] = []

    def prepare(self, batch: ForwardBatch) -> None:
        device = self._pool.data.device
        self._slots = upload(batch.out_slots, device)
        table = upload(batch.page_table, device).to(torch.int64)
        starts = batch.starts().tolist()
        self._sequences = [
            _Sequence(starts[i], starts[i + 1], self._slots_of(table[i], length))
            for i, length in enumerate(batch.seq_lens.tolist())
        ]

    def forward(
        self,
        place: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent_new: torch.Tensor,
        rope_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        layer = self._pool.spec.layer_ids[place]
        self._pool.set_mla_kv_buffer(layer, self._slots, latent_new, rope_new)
        queries = torch.cat((q_latent, q_rope), dim=-1).float() * self._scale
        for start, end, slots in self._sequences:
            rows = self._pool.get_rows(layer, slots).float()  # [context, rank + rope_dim]
            new, attended = queries[start:end], out[start:end]
            for block in query_blocks(len(new), queries.shape[1] * len(rows)):
                seen = len(rows) - len(new) + block.stop  # context tokens that the block's last token sees
                hidden = self._hidden(start, block, seen)
                attended[block] = _attend(new[block], rows[:seen], out.shape[-1], hidden, sinks)

    def _hidden(self, start: int, block: slice, seen: int) -> torch.Tensor:
        """Which of the first `seen` tokens of a context the new tokens in `block` do not see, the last of
        which sees them all: bool [queries, seen]. `start`: where the sequence's new tokens begin in the pack.
        """
        del start
        return later(block.stop - block.start, seen, self._pool.data.device)

    def _slots_of(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        at = torch.arange(length, device=pages.device)
        return pages[at // self._pool.page_size] * self._pool.page_size + at % self._pool.page_size


def later(queries: int, context: int, device: torch.device) -> torch.Tensor:
    """Which tokens of a context come after each of its last tokens: bool [queries, context]."""
    return torch.ones(queries, context, dtype=torch.bool, device=device).triu(1 + context - queries)


def _attend(
    queries: torch.Tensor, rows: torch.Tensor, rank: int, hidden: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """queries [n, heads, row] of the last n tokens of a context, rows [context, row], hidden [n, context],
    sinks [heads] -> [n, heads, rank]."""
    scores = queries @ rows.T  # [n, heads, context]
    scores.masked_fill_(hidden[:, None], -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ rows[:, :rank]
    column = sinks.float()[:, None].expand(len(queries), -1, 1)
    return torch.cat((column, scores), dim=-1).softmax(-1)[..., 1:] @ rows[:, :rank]
