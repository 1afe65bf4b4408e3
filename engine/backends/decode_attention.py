"""Paged attention of recorded decode steps, with our own kernel: nothing is planned on the host."""

from __future__ import annotations

import numpy as np
import torch

from engine.backends.page_indices import page_indices
from engine.batch import ForwardBatch
from engine.cuda import triton_kernels
from engine.cuda.attention_op import decode_attention, splits_of
from engine.cuda.limits import DTYPES, HEAD_DIMS
from engine.device_copies import pinned
from engine.paged_layers import HeadInputs
from kvcache.pool import MHAKVCache

_MOST_GROUP = 16
"""Query heads of a KV head: the rows of one tile of the tensor cores."""


class DecodeAttention:
    """An AttentionBackend, and AttendsHeads, for recorded steps of `sequences` rows, one new token each."""

    def __init__(
        self,
        pool: MHAKVCache,
        query_heads: int,
        scale: float,
        softcap: float | None,
        sequences: int,
        context_pages: int,
    ) -> None:
        """A row has at most `context_pages` pages."""
        self._pool = pool
        self._scale = scale
        self._softcap = softcap
        self._window = pool.spec.window
        self._device = device = pool.data.device
        kv_heads, dim = pool.spec.kv_heads, pool.spec.head_dim
        count = 2 * sequences + 1 + sequences * context_pages
        self._indices = torch.zeros(count, dtype=torch.int32, device=device)
        self._starts = self._indices[: sequences + 1]
        self._lengths = self._indices[sequences + 1 : 2 * sequences + 1]
        self._pages = self._indices[2 * sequences + 1 :]
        splits = splits_of(sequences, kv_heads)
        self._parts = torch.zeros(sequences, query_heads, splits, dim, device=device)
        self._peaks = torch.zeros(sequences, query_heads, splits, 2, device=device)
        self._counts = torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def fits(pool: MHAKVCache, query_heads: int) -> bool:
        """Whether the kernel computes attention over this pool."""
        spec = pool.spec
        return (
            triton_kernels.available()
            and spec.dtype in DTYPES
            and pool.data.dtype == spec.dtype
            and spec.head_dim in HEAD_DIMS
            and query_heads // spec.kv_heads <= _MOST_GROUP
        )

    def prepare(self, batch: ForwardBatch) -> None:
        """Copy the page table to the device, in one copy."""
        indices = page_indices(batch, self._pool.page_size, self._window)
        host = np.concatenate((indices.kv_starts, indices.kv_lens, indices.pages))
        self._indices[: len(host)].copy_(pinned(host, self._device), non_blocking=True)

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.attend(place, q, k_new, v_new, out, None, sinks)

    def attend(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        inputs: HeadInputs | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        q_norm, k_norm, eps, rotary, positions = inputs or (None, None, 0.0, None, None)
        decode_attention(
            _joined_heads(q), _joined_heads(k_new), _joined_heads(v_new), q_norm, k_norm, rotary, positions,
            self._pool.data[:, place], self._pages, self._starts, self._lengths, self._parts, self._peaks,
            self._counts, out, sinks, self._scale, eps, self._window, self._softcap,
        )  # fmt: skip


def _joined_heads(heads: torch.Tensor) -> torch.Tensor:
    """The same [T, heads, dim], where the heads of a token follow one another."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
