"""Latent attention in plain torch: the reference the others are tested against, and the fallback."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from kvcache.pool import MLAKVCache


class _Sequence(NamedTuple):
    start: int  # its new tokens are [start, end) of the pack
    end: int
    slots: torch.Tensor  # int64 [context]
    seen: torch.Tensor  # bool [new tokens, context]


class TorchLatentAttention:
    """A LatentBackend: gathers each sequence's rows and attends with float32 scores, one after the other.

    float32 also where rows are bfloat16: a score is a sum over kv_lora_rank + rope_dim products, several times
    more than a head of the expanded form has.
    """

    def __init__(self, pool: MLAKVCache, heads: int, scale: float) -> None:
        del heads  # every one attends to the same rows
        self._pool = pool
        self._rank = pool.spec.kv_lora_rank
        self._scale = scale
        self._slots = torch.empty(0, dtype=torch.int64)
        self._sequences: list[_Sequence] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """See LatentBackend."""
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
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent_new: torch.Tensor,
        rope_new: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See LatentBackend."""
        layer = self._pool.spec.layer_ids[place]
        self._pool.set_mla_kv_buffer(layer, self._slots, latent_new, rope_new)
        queries = torch.cat((q_latent, q_rope), dim=-1).float()
        for start, end, slots, seen in self._sequences:
            rows = self._pool.get_rows(layer, slots).float()  # [context, rank + rope_dim]
            attended = F.scaled_dot_product_attention(
                queries[start:end].transpose(0, 1),
                rows.expand(queries.shape[1], -1, -1),
                rows[:, : self._rank].expand(queries.shape[1], -1, -1),
                attn_mask=seen,
                scale=self._scale,
            )
            out[start:end] = attended.transpose(0, 1)

    def _sequence(self, start: int, end: int, length: int, pages: torch.Tensor) -> _Sequence:
        at = torch.arange(length, device=pages.device)
        slots = pages[at // self._pool.page_size] * self._pool.page_size + at % self._pool.page_size
        return _Sequence(start, end, slots, at <= at[length - (end - start) :, None])
