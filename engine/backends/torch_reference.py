"""Paged attention in plain torch: the reference for tests of other backends, and the fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from kvcache.pool import MHAKVCache

QUERIES_AT_ONCE = 256
"""Queries of a chunk with sinks or a softcap that are computed together. Their scores, float32 [query heads,
queries, keys], are held in memory, which SDPA avoids."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    start: int  # its new tokens are [start, end) of the pack
    end: int
    pages: torch.Tensor  # int64: the pages with a key that some new token sees
    keys: slice  # of the tokens on these pages: from the first that is seen to the last new one
    mask: torch.Tensor | None  # bool [new tokens, keys]; None if is_causal, or if one query sees all keys
    is_causal: bool


class TorchAttention:
    """An AttentionBackend that gathers each sequence's pages and calls SDPA, one sequence at a time.

    It does not gather pages that no new token sees, so their table entries may have any value.
    """

    def __init__(
        self, pool: MHAKVCache, query_heads: int, scale: float, softcap: float | None = None
    ) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._window = pool.spec.window
        self._gqa = query_heads != pool.spec.kv_heads
        self._scale = scale
        self._softcap = softcap
        self._slots = torch.empty(0, dtype=torch.int64)
        self._sequences: list[_Sequence] = []

    def prepare(self, batch: ForwardBatch) -> None:
        device = self._pool.data.device
        self._slots = torch.from_numpy(batch.out_slots).to(device)
        table = torch.from_numpy(batch.page_table).to(device, torch.int64)
        starts = batch.starts().tolist()
        self._sequences = [
            self._sequence(starts[i], starts[i + 1], length, table[i])
            for i, length in enumerate(batch.seq_lens.tolist())
        ]

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._pool.set_kv_buffer(self._pool.spec.layer_ids[place], self._slots, k_new, v_new)
        for sequence in self._sequences:
            # [pages, 2, Hkv, page_size, D] -> [2, Hkv, keys, D]
            pages = self._pool.read_pages(place, sequence.pages)
            kv = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, sequence.keys]
            of_sequence = q[sequence.start : sequence.end].transpose(0, 1)  # [Hq, new, D]
            if sinks is None and self._softcap is None:
                attended = self._attend(of_sequence, kv, sequence)
            else:
                attended = self._attend_by_definition(of_sequence, kv, sequence, sinks)
            out[sequence.start : sequence.end] = attended.transpose(0, 1)

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, sequence: _Sequence) -> torch.Tensor:
        """q [Hq, new, D], kv [2, Hkv, keys, D] -> [Hq, new, D]."""
        attended: torch.Tensor = F.scaled_dot_product_attention(
            q[None],
            kv[None, 0],
            kv[None, 1],
            attn_mask=sequence.mask,
            is_causal=sequence.is_causal,
            scale=self._scale,
            enable_gqa=self._gqa,
        )
        return attended[0]

    def _attend_by_definition(
        self, q: torch.Tensor, kv: torch.Tensor, sequence: _Sequence, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """What SDPA does not compute: soft-capped scores, and sinks.

        A sink is an additional score of its head. It takes part in the softmax and adds no value.
        """
        heads, new, _ = q.shape
        k, v = kv.float().repeat_interleave(heads // kv.shape[1], dim=1)
        mask = sequence.mask
        if sequence.is_causal:
            mask = torch.ones(new, new, dtype=torch.bool, device=q.device).tril()
        attended = torch.empty_like(q)
        for start in range(0, new, QUERIES_AT_ONCE):
            queries = slice(start, start + QUERIES_AT_ONCE)
            scores = q[:, queries].float() @ k.transpose(1, 2) * self._scale
            if self._softcap is not None:
                scores = (scores / self._softcap).tanh() * self._softcap
            if mask is not None:
                scores.masked_fill_(~mask[queries], -torch.inf)
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
                weights = torch.cat((column, scores), dim=-1).softmax(-1)[..., 1:]
            attended[:, queries] = (weights @ v).to(q.dtype)
        return attended

    def _sequence(self, start: int, end: int, length: int, pages: torch.Tensor) -> _Sequence:
        new = end - start
        first = 0 if self._window is None else max(0, length - new + 1 - self._window)
        page = first // self._page_size
        keys = length - first
        mask = None
        slides = self._window is not None and keys > self._window  # the window moves between the queries
        if new > 1 and (new < keys or slides):
            mask = torch.ones(new, keys, dtype=torch.bool, device=pages.device).tril(keys - new)
            if self._window is not None:
                mask = mask.triu(keys - new + 1 - self._window)
        return _Sequence(
            start,
            end,
            pages[page : -(-length // self._page_size)],
            slice(first - page * self._page_size, length - page * self._page_size),
            mask,
            is_causal=new > 1 and mask is None,
        )
