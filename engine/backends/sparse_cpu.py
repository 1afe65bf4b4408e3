"""Sparse latent attention on CPUs: torch chooses, and the C++ op of latent attention reads the chosen rows.

As on CUDA, each query is a sequence of its own, and each row that it attends to a page of one token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.backends.sparse_reference import TorchSparseAttention
from engine.cpu.mla import CpuLatentAttention
from engine.cpu.op import KernelsUnavailable
from kvcache.pool import MLAKVCache, RowsOfKVCache
from kvcache.quant import KVFormat

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.paged_layers import IndexInputs
    from engine.token_choice import TokenChoice


class CpuSparseAttention(TorchSparseAttention):
    """A LatentBackend and SelectsTokens."""

    def __init__(self, pool: MLAKVCache, heads: int, scale: float, choice: TokenChoice) -> None:
        """Raises KernelsUnavailable if the op cannot serve `pool`."""
        if pool.spec.stored is KVFormat.FP4_E2M1:
            raise KernelsUnavailable(f"rows of {pool.spec.stored} share their scales' place in a page")
        super().__init__(pool, heads, scale, choice)
        self._of_rows = CpuLatentAttention(RowsOfKVCache(pool), heads, scale)
        self._batch: ForwardBatch | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self._batch = replace(
            batch,
            q_lens=np.ones(len(batch.positions), np.int32),
            seq_lens=self._choice.seen(batch.positions),
            out_slots=self._rows_of(batch.out_slots),
        )

    def select(self, place: int, inputs: IndexInputs) -> None:
        super().select(place, inputs)
        assert self._batch is not None
        chosen = self._chosen.numpy()
        rows = np.zeros(chosen.shape, np.int32)  # in the first layer of their pages
        for start, end, slots in self._sequences:
            rows[start:end] = self._rows_of(slots.numpy())[chosen[start:end]]
        self._of_rows.prepare(replace(self._batch, page_table=rows))

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
        # A page of one token has one layer: the rows of this one are so many pages behind those of the first.
        first = place * self._pool.page_size
        self._of_rows.forward(first, q_latent, q_rope, latent_new, rope_new, out, sinks)

    def _rows_of(self, slots: np.ndarray) -> np.ndarray:
        pages, offsets = np.divmod(slots, self._pool.page_size)
        return pages * self._pool.page_size * len(self._pool.spec.layer_ids) + offsets
