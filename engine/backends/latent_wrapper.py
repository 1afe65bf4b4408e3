"""FlashInfer's wrapper for latent attention, and how it is planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.flashinfer import BACKEND
from engine.backends.page_indices import FixedIndices
from engine.backends.workspace import WORKSPACE_BYTES, Workspace
from engine.device_copies import pinned
from kvcache.pool import MLAKVCache

Int32s = npt.NDArray[np.int32]


class LatentWrapper:
    """One plan per step serves all layers. The two parts of a row are used in place, as strided views."""

    def __init__(
        self,
        pool: MLAKVCache,
        heads: int,
        scale: float,
        workspace: torch.Tensor | None = None,
        buffers: FixedIndices | None = None,
        has_sinks: bool = False,
    ) -> None:
        """`workspace` and `buffers` are as in FlashInferAttention. With `has_sinks` the kernel, which has
        none, returns the logarithms of its sums, too, and run() scales the results with them. Raises
        ImportError if FlashInfer is not installed, or has no metadata of plans (before 0.7.2)."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

        self._spec = pool.spec
        self._heads = heads
        self._scale = scale
        self._has_sinks = has_sinks
        self._dtype = pool.data.dtype
        self._device = pool.data.device
        if workspace is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self.workspace = workspace  # wrappers of recorded steps share it
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

    def plan(
        self, q_starts: Int32s, kv_starts: Int32s, pages: torch.Tensor, kv_lens: Int32s, page_size: int
    ) -> None:
        """As in PageIndices, but that `pages` are on the device. What they are may change until run()."""
        with self._planned.in_use():
            metadata = self._metadata.csr(
                qo_indptr=pinned(q_starts, self._device),
                kv_indptr=pinned(kv_starts, self._device),
                kv_indices=pages,
                kv_len_arr=pinned(kv_lens, self._device),
            )
            self._wrapper.plan(
                metadata=metadata,
                query_layout="split",
                kv_cache_layout="split",
                num_heads=self._heads,
                head_dim_ckv=self._spec.kv_lora_rank,
                head_dim_kpe=self._spec.rope_dim,
                page_size=page_size,
                causal=True,
                sm_scale=self._scale,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                lse_mode="basee" if self._has_sinks else "none",
            )

    def run(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """q_latent [T, heads, kv_lora_rank], q_rope [T, heads, rope_dim], rows [pages, page size, row_dim] of
        one layer, `out` as q_latent."""
        assert self._has_sinks == (sinks is not None)
        rank, end = self._spec.kv_lora_rank, self._spec.key_dim
        query = q_latent.contiguous(), q_rope.contiguous()
        cache = rows[..., :rank], rows[..., rank:end]
        if sinks is None:
            self._wrapper.run(query=query, kv_cache=cache, out=out)
            return
        sums = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        self._wrapper.run(
            query=query, kv_cache=cache, out=out, lse=sums, return_lse=True, return_lse_base_on_e=True
        )
        # s / (s + e^sink), where s is the sum of e^score
        out.mul_(torch.sigmoid(sums - sinks.float())[..., None])
