"""Latent attention with FlashInfer, on CUDA. The two parts of a row are used in place, as strided views."""

from __future__ import annotations

from typing import Any

import torch

from engine.backends.flashinfer import BACKEND
from engine.backends.flashinfer_limits import check_latent_step
from engine.backends.new_slots import NewSlots
from engine.backends.page_indices import FixedIndices, page_indices
from engine.backends.workspace import WORKSPACE_BYTES, Workspace
from engine.batch import ForwardBatch
from engine.device_copies import pinned, upload
from kvcache.pool import MLAKVCache


class FlashInferLatentAttention:
    """A LatentBackend. One plan per step serves all layers, for prefill chunks and decode rows."""

    def __init__(
        self,
        pool: MLAKVCache,
        heads: int,
        scale: float,
        workspace: torch.Tensor | None = None,
        buffers: FixedIndices | None = None,
    ) -> None:
        """`workspace` and `buffers` are as in FlashInferAttention. Raises ImportError if FlashInfer is not
        installed, or has no metadata of plans (before 0.7.2)."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

        self._pool = pool
        self._heads = heads
        self._scale = scale
        self._device = pool.data.device
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._shared = workspace
        self._planned = Workspace(self._device)
        fixed: dict[str, Any] = {}
        if buffers is not None:
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.q_starts,
                "kv_indptr": buffers.kv_starts,
                "kv_indices": buffers.pages,
                "kv_len_arr": buffers.lengths,
            }
        self._metadata: Any = MLAPlanMetadata
        self._wrapper: Any = BatchMLAPagedAttentionWrapper(workspace, backend=BACKEND, **fixed)
        self._slots = NewSlots(
            pool.page_size, self._device, None if buffers is None else len(buffers.lengths)
        )

    def fixed(self, sequences: int, context_pages: int) -> FlashInferLatentAttention:
        """This backend for recorded decode steps, as in FlashInferAttention."""
        buffers = FixedIndices.allocate(sequences, context_pages, self._device)
        return FlashInferLatentAttention(self._pool, self._heads, self._scale, self._shared, buffers)

    def check_step(self, tokens: int, sequences: int) -> None:
        """See LimitsSteps."""
        check_latent_step(self._device, self._heads, tokens, sequences)

    def prepare(self, batch: ForwardBatch) -> None:
        indices = page_indices(batch, self._pool.page_size)
        self._slots.fill(batch.out_slots)
        with self._planned.in_use():
            metadata = self._metadata.csr(
                qo_indptr=pinned(indices.q_starts, self._device),
                kv_indptr=pinned(indices.kv_starts, self._device),
                kv_indices=upload(indices.pages, self._device),
                kv_len_arr=pinned(indices.kv_lens, self._device),
            )
            self._wrapper.plan(
                metadata=metadata,
                query_layout="split",
                kv_cache_layout="split",
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
        self._pool.write(place, self._slots.pages, self._slots.offsets, latent_new, rope_new)
        of_layer = self._pool.data[:, place]  # [page, offset, rank + rope_dim], page-strided
        latents, ropes = of_layer[..., : spec.kv_lora_rank], of_layer[..., spec.kv_lora_rank :]
        self._wrapper.run(
            query=(q_latent.contiguous(), q_rope.contiguous()), kv_cache=(latents, ropes), out=out
        )
