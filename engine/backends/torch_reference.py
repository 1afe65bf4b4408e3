"""Paged attention in plain torch: the reference for tests of other backends, and the fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.backends.query_blocks import query_blocks
from engine.batch import ForwardBatch
from engine.device_copies import upload
from kvcache.pool import MHAKVCache


@dataclass(frozen=True, slots=True)
class _Sequence:
    start: int  # its new tokens are [start, end) of the pack
    end: int
    pages: torch.Tensor  # int64: the pages with a key that some new token sees
    keys: slice  # of the tokens on these pages: from the first that is seen to the last new one
    is_causal: bool  # each new token sees all up to itself, and there is no key before the first one


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
        self._slots = upload(batch.out_slots, device)
        table = upload(batch.page_table, device).to(torch.int64)
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
        plain = sinks is None and self._softcap is None
        for sequence in self._sequences:
            kv = self._gather(place, sequence)
            of_sequence, attended = (x[sequence.start : sequence.end].transpose(0, 1) for x in (q, out))
            if plain and sequence.is_causal:
                attended.copy_(self._attend(of_sequence, kv, None, is_causal=True))
                continue
            if not plain:
                kv = kv.float()
            heads, new, _ = of_sequence.shape
            for queries in query_blocks(new, heads * kv.shape[2]):
                block, mask = of_sequence[:, queries], self._mask(queries, sequence)
                if plain:
                    attended[:, queries] = self._attend(block, kv, mask)
                else:
                    attended[:, queries] = self._attend_by_definition(block, kv, mask, sinks)

    def _gather(self, place: int, sequence: _Sequence) -> torch.Tensor:
        """[2, Hkv, keys, D], from pages [pages, 2, Hkv, page_size, D]."""
        pages = self._pool.read_pages(place, sequence.pages)
        return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, sequence.keys]

    def _mask(self, queries: slice, sequence: _Sequence) -> torch.Tensor | None:
        """bool [queries, keys]: which keys each of these new tokens sees. None if the only one sees all."""
        new, keys = sequence.end - sequence.start, sequence.keys.stop - sequence.keys.start
        if new == 1:
            return None
        last = keys - new + queries.start  # key that the first of them sees
        shape = (queries.stop - queries.start, keys)
        mask = torch.ones(shape, dtype=torch.bool, device=self._pool.data.device).tril(last)
        return mask if self._window is None else mask.triu(last + 1 - self._window)

    def _attend(
        self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, is_causal: bool = False
    ) -> torch.Tensor:
        """q [Hq, queries, D], kv [2, Hkv, keys, D] -> [Hq, queries, D]."""
        attended: torch.Tensor = F.scaled_dot_product_attention(
            q[None],
            kv[None, 0],
            kv[None, 1],
            attn_mask=mask,
            is_causal=is_causal,
            scale=self._scale,
            enable_gqa=self._gqa,
        )
        return attended[0]

    def _attend_by_definition(
        self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """What SDPA does not compute: soft-capped scores, and sinks. kv is float32.

        A sink is an additional score of its head. It takes part in the softmax and adds no value. The query
        heads of a KV head are rows of one product: K and V are not repeated for each of them.
        """
        heads, queries, head_dim = q.shape
        k, v = kv
        rows = q.float().reshape(len(k), -1, head_dim)  # [Hkv, heads of one x queries, D]
        scores = (rows @ k.transpose(1, 2) * self._scale).view(heads, queries, -1)
        if self._softcap is not None:
            scores = (scores / self._softcap).tanh() * self._softcap
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.float()[:, None, None].expand(-1, queries, 1)
            weights = torch.cat((column, scores), dim=-1).softmax(-1)[..., 1:]
        values: torch.Tensor = weights.reshape(len(k), -1, weights.shape[-1]) @ v
        return values.view(q.shape).to(q.dtype)

    def _sequence(self, start: int, end: int, length: int, pages: torch.Tensor) -> _Sequence:
        new = end - start
        first = 0 if self._window is None else max(0, length - new + 1 - self._window)
        page = first // self._page_size
        keys = length - first
        slides = self._window is not None and keys > self._window  # the window moves between the queries
        return _Sequence(
            start,
            end,
            pages[page : -(-length // self._page_size)],
            slice(first - page * self._page_size, length - page * self._page_size),
            is_causal=1 < new == keys and not slides,
        )
