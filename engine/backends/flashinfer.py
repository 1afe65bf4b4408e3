"""Paged attention with FlashInfer, on CUDA. Plain tiles are FlashInfer's HND layout and are used in place.

`plan` reads the offsets and lengths on the host, so they are given to it there, in pinned memory. Given on
the device, each of them would make the host wait for all work on it. It reads the page ids on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.backends.decode_attention import DecodeAttention
from engine.backends.new_slots import NewSlots
from engine.backends.page_indices import FixedIndices, PageIndices, page_indices
from engine.backends.workspace import WORKSPACE_BYTES, Workspace
from engine.batch import ForwardBatch
from engine.device_copies import pinned, upload
from kvcache.pool import MHAKVCache

BACKEND = "fa2"
"""FlashInfer's kernels, by name: "auto" may take ones that refuse a pool whose layers are strided by page."""


class FlashInferAttention:
    """An AttentionBackend. One plan serves all layers, for prefill chunks and decode rows.

    One prefill wrapper serves mixed batches, because a row with one new token is a prefill of length one.
    Separate wrappers for prefill and decode would split the batch, which costs a copy of q and out in every
    layer. For decode alone it runs the same tiles as FlashInfer's decode wrapper with tensor cores.
    """

    def __init__(
        self,
        pool: MHAKVCache,
        query_heads: int,
        scale: float,
        sinks: bool = False,
        softcap: float | None = None,
        workspace: torch.Tensor | None = None,
        buffers: FixedIndices | None = None,
    ) -> None:
        """`sinks` says whether forward() is called with sinks. `workspace` may be shared by backends that run
        one after the other. `buffers` are those of a recorded step. Raises ImportError if FlashInfer is not
        installed, or has no kernel for sinks that are needed."""
        self._pool = pool
        self._query_heads = query_heads
        self._scale = scale
        self._softcap = softcap
        self._device = pool.data.device
        self._window = pool.spec.window
        self._sinks = sinks
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self.workspace = workspace
        self._planned = Workspace(self._device)
        self._wrapper: Any = paged_wrapper(pool, workspace, sinks, buffers)
        count = None if buffers is None else len(buffers.lengths)
        self._slots = NewSlots(pool.page_size, self._device, count)

    def fixed(self, sequences: int, context_pages: int) -> FlashInferAttention | DecodeAttention:
        """This backend for decode steps of `sequences` rows with at most `context_pages` pages each, which
        are recorded: what they read on the device is always at the same place."""
        if DecodeAttention.fits(self._pool, self._query_heads):
            return DecodeAttention(
                self._pool, self._query_heads, self._scale, self._softcap, sequences, context_pages
            )
        buffers = FixedIndices.allocate(sequences, context_pages, self._device)
        return FlashInferAttention(
            self._pool, self._query_heads, self._scale, self._sinks, self._softcap, self.workspace, buffers
        )

    def prepare(self, batch: ForwardBatch) -> None:
        indices = page_indices(batch, self._pool.page_size, self._window)
        self._slots.fill(batch.out_slots)
        pages = upload(indices.pages, self._device)
        with self._planned.in_use():
            plan(self._wrapper, self._pool, indices, pages, self._query_heads, self._scale, self._softcap)

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert (sinks is not None) == self._sinks, "a layer's sinks differ from what the loader found"
        self._pool.write(place, self._slots.pages, self._slots.offsets, k_new, v_new)
        of_layer = self._pool.data[:, place]  # [page, 2, head, page_size, head_dim], page-strided
        with_sinks = () if sinks is None else (sinks.float(), self._scale)
        self._wrapper.run(q.contiguous(), (of_layer[:, 0], of_layer[:, 1]), *with_sinks, out=out)


def plan(
    wrapper: Any,
    pool: MHAKVCache,
    indices: PageIndices,
    pages: torch.Tensor,
    query_heads: int,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Plan a step; `pages` are those of `indices`, or what will be there, on the device."""
    spec, device = pool.spec, pool.data.device
    wrapper.plan(
        pinned(indices.q_starts, device),
        pinned(indices.kv_starts, device),
        pages,
        pinned(indices.last_page_lens, device),
        query_heads,
        spec.kv_heads,
        spec.head_dim,
        pool.page_size,
        causal=True,
        window_left=_window_left(pool),
        sm_scale=scale,
        logits_soft_cap=softcap,
        q_data_type=spec.dtype,
        kv_data_type=pool.data.dtype,
        seq_lens=pinned(indices.kv_lens, device),
    )


def _window_left(pool: MHAKVCache) -> int:
    """FlashInfer counts the keys to the left of a query; ours includes the query's own."""
    return -1 if pool.spec.window is None else pool.spec.window - 1


def paged_wrapper(
    pool: MHAKVCache, workspace: torch.Tensor, sinks: bool, buffers: FixedIndices | None
) -> Any:
    """FlashInfer's wrapper, or its variant whose run() takes the sinks, float32 [query heads], and the scale
    once more."""
    import flashinfer

    fixed: dict[str, Any] = {}
    if buffers is not None:
        fixed = {
            "use_cuda_graph": True,
            "qo_indptr_buf": buffers.q_starts,
            "paged_kv_indptr_buf": buffers.kv_starts,
            "paged_kv_indices_buf": buffers.pages,
            "paged_kv_last_page_len_buf": buffers.lengths,
        }
    if not sinks:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", backend=BACKEND, **fixed
        )
    variant = getattr(flashinfer, "BatchAttentionWithAttentionSinkWrapper", None)
    if variant is None:
        raise ImportError("this FlashInfer has no attention sinks")
    return variant(
        workspace,
        kv_layout="HND",
        backend=BACKEND,
        q_data_type=pool.spec.dtype,
        kv_data_type=pool.data.dtype,
        head_dim_qk=pool.spec.head_dim,
        head_dim_vo=pool.spec.head_dim,
        window_left=_window_left(pool),
        **fixed,
    )
