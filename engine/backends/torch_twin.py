"""Paged attention in plain torch: the reference the others are tested against, and the fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from kvcache.pool import MHAKVCache


@dataclass(frozen=True, slots=True)
class _Sequence:
    start: int  # its new tokens are [start, end) of the pack
    end: int
    length: int  # context after this step
    pages: torch.Tensor  # int64 [pages in use]
    mask: torch.Tensor | None  # bool [new tokens, length], None where is_causal or one query says it all
    is_causal: bool


class TorchAttention:
    """An AttentionBackend: gathers each sequence's pages and calls SDPA on them, one sequence at a time."""

    def __init__(self, pool: MHAKVCache, query_heads: int, scale: float) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._gqa = query_heads != pool.data.shape[3]
        self._scale = scale
        self._slots = torch.empty(0, dtype=torch.int64)
        self._sequences: list[_Sequence] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """See AttentionBackend."""
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
        """See AttentionBackend."""
        assert sinks is None, "this backend knows no attention sinks"
        self._pool.set_kv_buffer(self._pool.spec.layer_ids[place], self._slots, k_new, v_new)
        of_layer = self._pool.data[:, place]  # [pages, 2, Hkv, page_size, D]
        for sequence in self._sequences:
            # [pages, 2, Hkv, page_size, D] -> [2, Hkv, length, D]
            kv = of_layer[sequence.pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : sequence.length]
            attended = F.scaled_dot_product_attention(
                q[sequence.start : sequence.end].transpose(0, 1)[None],
                kv[None, 0],
                kv[None, 1],
                attn_mask=sequence.mask,
                is_causal=sequence.is_causal,
                scale=self._scale,
                enable_gqa=self._gqa,
            )
            out[sequence.start : sequence.end] = attended[0].transpose(0, 1)

    def _sequence(self, start: int, end: int, length: int, pages: torch.Tensor) -> _Sequence:
        new = end - start
        mask = None
        if 1 < new < length:
            mask = torch.ones(new, length, dtype=torch.bool, device=pages.device).tril(length - new)
        return _Sequence(
            start, end, length, pages[: -(-length // self._page_size)], mask, is_causal=1 < new == length
        )
