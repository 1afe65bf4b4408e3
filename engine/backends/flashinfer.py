"""Paged attention with FlashInfer, on CUDA. Plain tiles are FlashInfer's HND layout and are used in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.batch import ForwardBatch
from kvcache.pool import MHAKVCache

WORKSPACE_BYTES = 256 << 20


class FlashInferAttention:
    """An AttentionBackend. One plan per step serves all layers, for prefill chunks and decode rows.

    One prefill wrapper serves mixed batches, because a row with one new token is a prefill of length one.
    Separate wrappers for prefill and decode would split the batch, which costs a copy of q and out in every
    layer.
    """

    def __init__(
        self,
        pool: MHAKVCache,
        query_heads: int,
        scale: float,
        sinks: bool = False,
        softcap: float | None = None,
    ) -> None:
        """`sinks` says whether forward() is called with sinks. Raises ImportError if FlashInfer is not
        installed, or has no kernel for sinks that are needed."""
        import flashinfer

        self._pool = pool
        self._query_heads = query_heads
        self._scale = scale
        self._softcap = softcap
        self._device = pool.data.device
        self._window = pool.spec.window
        # FlashInfer counts the keys to the left of a query; ours includes the query's own
        self._window_left = -1 if self._window is None else self._window - 1
        self._sinks = sinks
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._wrapper: Any
        if sinks:
            self._wrapper = _wrapper_with_sinks(flashinfer, workspace, pool, self._window_left)
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
        self._slots = torch.empty(0, dtype=torch.int64)

    def prepare(self, batch: ForwardBatch) -> None:
        page_size = self._pool.page_size
        ends = -(-batch.seq_lens // page_size)  # [S] pages
        firsts = np.zeros_like(ends)
        if self._window is not None:
            # Earlier pages may be freed already. Without them the context is shorter and begins on a page
            # border. FlashInfer counts its window from the end of the context, so it needs no correction.
            unseen = batch.seq_lens - batch.q_lens + 1 - self._window
            firsts = np.maximum(unseen, 0) // page_size
        kv_starts = np.zeros(len(ends) + 1, dtype=np.int32)
        np.cumsum(ends - firsts, out=kv_starts[1:])
        logical = np.arange(batch.page_table.shape[1])
        in_use = (logical >= firsts[:, None]) & (logical < ends[:, None])
        self._slots = torch.from_numpy(batch.out_slots).to(self._device)
        self._wrapper.plan(
            self._on_device(batch.starts()),
            self._on_device(kv_starts),
            self._on_device(batch.page_table[in_use]),
            self._on_device((batch.seq_lens - 1) % page_size + 1),  # tokens in each last page
            self._query_heads,
            self._pool.spec.kv_heads,
            self._pool.spec.head_dim,
            page_size,
            causal=True,
            window_left=self._window_left,
            sm_scale=self._scale,
            logits_soft_cap=self._softcap,
            q_data_type=self._pool.spec.dtype,
            kv_data_type=self._pool.data.dtype,
        )

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
        self._pool.set_kv_buffer(self._pool.spec.layer_ids[place], self._slots, k_new, v_new)
        of_layer = self._pool.data[:, place]  # [page, 2, head, page_size, head_dim], page-strided
        with_sinks = () if sinks is None else (sinks.float(), self._scale)
        self._wrapper.run(q.contiguous(), (of_layer[:, 0], of_layer[:, 1]), *with_sinks, out=out)

    def _on_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32, copy=False)).to(self._device)


def _wrapper_with_sinks(flashinfer: Any, workspace: torch.Tensor, pool: MHAKVCache, window_left: int) -> Any:
    """FlashInfer's variant whose run() takes the sinks, float32 [query heads], and the scale once more."""
    variant = getattr(flashinfer, "BatchAttentionWithAttentionSinkWrapper", None)
    if variant is None:
        raise ImportError("this FlashInfer has no attention sinks")
    return variant(
        workspace,
        kv_layout="HND",
        q_data_type=pool.spec.dtype,
        kv_data_type=pool.data.dtype,
        head_dim_qk=pool.spec.head_dim,
        head_dim_vo=pool.spec.head_dim,
        window_left=window_left,
    )
