"""Latent attention with FlashInfer, on CUDA. The two parts of a row are used in place, as strided views."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.backends.flashinfer import WORKSPACE_BYTES
from engine.batch import ForwardBatch
from kvcache.pool import MLAKVCache

WIDTHS = (512, 64)
"""The kv_lora_rank and rope_dim for which FlashInfer has kernels. Every published DeepSeek model has them."""


class FlashInferLatentAttention:
    """A LatentBackend. One plan per step serves all layers, for prefill chunks and decode rows."""

    def __init__(self, pool: MLAKVCache, heads: int, scale: float) -> None:
        """Raises ImportError if FlashInfer is not installed."""
        import flashinfer.mla

        self._pool = pool
        self._heads = heads
        self._scale = scale
        self._device = pool.data.device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
        self._slots = torch.empty(0, dtype=torch.int64)

    def prepare(self, batch: ForwardBatch) -> None:
        pages = -(-batch.seq_lens // self._pool.page_size)  # [S] in use
        kv_starts = np.zeros(len(pages) + 1, dtype=np.int32)
        np.cumsum(pages, out=kv_starts[1:])
        in_use = np.arange(batch.page_table.shape[1]) < pages[:, None]
        self._slots = torch.from_numpy(batch.out_slots).to(self._device)
        self._wrapper.plan(
            qo_indptr=self._on_device(batch.starts()),
            kv_indptr=self._on_device(kv_starts),
            kv_indices=self._on_device(batch.page_table[in_use]),
            kv_len_arr=self._on_device(batch.seq_lens),
            num_heads=self._heads,
            head_dim_ckv=self._pool.spec.kv_lora_rank,
            head_dim_kpe=self._pool.spec.rope_dim,
            page_size=self._pool.page_size,
            causal=True,
            sm_scale=self._scale,
            q_data_type=self._pool.data.dtype,
            kv_data_type=self._pool.data.dtype,
        )

    def forward(
        self,
        place: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent_new: torch.Tensor,
        rope_new: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        spec = self._pool.spec
        self._pool.set_mla_kv_buffer(spec.layer_ids[place], self._slots, latent_new, rope_new)
        of_layer = self._pool.data[:, place]  # [page, offset, rank + rope_dim], page-strided
        latents, ropes = of_layer[..., : spec.kv_lora_rank], of_layer[..., spec.kv_lora_rank :]
        self._wrapper.run(q_latent.contiguous(), q_rope.contiguous(), latents, ropes, out=out)

    def _on_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32, copy=False)).to(self._device)
