"""Latent attention with FlashInfer, on CUDA."""

from __future__ import annotations

import torch

from engine.backends.flashinfer_limits import check_latent_step
from engine.backends.latent_wrapper import LatentWrapper
from engine.backends.new_slots import NewSlots
from engine.backends.page_indices import FixedIndices, page_indices
from engine.batch import ForwardBatch
from engine.device_copies import upload
from kvcache.pool import MLAKVCache


class FlashInferLatentAttention:
    """A LatentBackend. It attends to prefill chunks and to decode rows in one call."""

    def __init__(
        self,
        pool: MLAKVCache,
        heads: int,
        scale: float,
        workspace: torch.Tensor | None = None,
        buffers: FixedIndices | None = None,
        has_sinks: bool = False,
    ) -> None:
        """As LatentWrapper."""
        self._has_sinks = has_sinks
        self._pool = pool
        self._heads = heads
        self._scale = scale
        self._device = pool.data.device
        self._wrapper = LatentWrapper(pool, heads, scale, workspace, buffers, has_sinks)
        self._slots = NewSlots(
            pool.page_size, self._device, None if buffers is None else len(buffers.lengths)
        )

    def fixed(self, sequences: int, context_pages: int) -> FlashInferLatentAttention:
        """This backend for recorded decode steps, as in FlashInferAttention."""
        buffers = FixedIndices.allocate(sequences, context_pages, self._device)
        return FlashInferLatentAttention(
            self._pool, self._heads, self._scale, self._wrapper.workspace, buffers, self._has_sinks
        )

    def check_step(self, tokens: int, sequences: int) -> None:
        """See LimitsSteps."""
        check_latent_step(self._device, self._heads, tokens, sequences)

    def prepare(self, batch: ForwardBatch) -> None:
        indices = page_indices(batch, self._pool.page_size)
        self._slots.fill(batch.out_slots)
        pages = upload(indices.pages, self._device)
        self._wrapper.plan(indices.q_starts, indices.kv_starts, pages, indices.kv_lens, self._pool.page_size)

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
        self._pool.write(place, self._slots.pages, self._slots.offsets, latent_new, rope_new)
        self._wrapper.run(q_latent, q_rope, self._pool.data[:, place], out, sinks)
