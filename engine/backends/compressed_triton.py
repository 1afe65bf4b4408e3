"""Compressed attention on CUDA: our Triton kernels read rows and entries where they are."""

from __future__ import annotations

import torch

from engine.backends.compressed_reference import TorchCompressedAttention
from engine.backends.pick import BackendUnavailable
from engine.backends.query_blocks import query_blocks
from engine.cuda import triton_kernels
from engine.cuda.compressed_op import compressed_attention
from engine.cuda.index_op import index_scores
from engine.paged_layers import Compression, IndexQueries
from kvcache.pool import EntryKVCache

DTYPES = (torch.bfloat16, torch.float16)


class TritonCompressedAttention(TorchCompressedAttention):
    """A CompressedBackend."""

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor,
        compression: Compression | None,
        index: IndexQueries | None,
    ) -> None:
        chosen = None
        if compression is not None and index is not None and (top := self._top(compression)) is not None:
            chosen = self._best(layer, q.shape[-1], compression.tokens, top, index)
        contexts = self._contexts
        compressed_attention(
            q.contiguous(),
            self._window.rows(layer),
            self._window_table.ids,
            None if compression is None else self._entries.rows(layer),
            contexts.page_table,
            chosen,
            contexts.sequences,
            contexts.visible,
            sinks,
            out,
            self._scale,
            self._window_tokens,
            0 if compression is None else compression.tokens,
            self._page_size,
        )

    def _best(self, layer: int, width: int, tokens: int, top: int, index: IndexQueries) -> torch.Tensor:
        """The entries that the indexer scores highest, int32 [T, top]. A query may not see the last ones."""
        contexts, keys = self._contexts, self._entries.rows(layer)[..., width:]
        context = contexts.page_table.shape[1] * keys.shape[1]
        q, weights = index.q.contiguous(), index.weights.contiguous()
        seen = contexts.visible // tokens
        chosen = torch.empty(len(q), top, dtype=torch.int32, device=q.device)
        for block in query_blocks(len(q), context):
            scores = torch.empty(len(q[block]), context, dtype=torch.float32, device=q.device)
            sequences = contexts.sequences[block]
            index_scores(q[block], weights[block], keys, contexts.page_table, sequences, seen[block], scores)
            chosen[block] = scores.topk(top).indices
        return chosen


def check_entries(entries: EntryKVCache, head_dim: int, tokens: int | None) -> None:
    """Raises BackendUnavailable if our kernels cannot attend to this pool. `tokens`: those of an entry that
    an indexer scores; None: there is no indexer."""
    if not triton_kernels.available():
        raise BackendUnavailable("compressed attention needs Triton, which is not installed")
    if entries.spec.dtype not in DTYPES:
        raise BackendUnavailable(f"our kernels attend in bfloat16 and float16, not in {entries.spec.dtype}")
    widths = {head_dim, *(rows.width - head_dim for rows in entries.spec.rows if rows.width > head_dim)}
    for width in sorted(widths):
        if width < 16 or width & (width - 1):
            raise BackendUnavailable(f"rows of a power of two values from 16 on are read, not of {width}")
    if tokens is not None and entries.page_size % tokens:
        raise BackendUnavailable(f"a page of {entries.page_size} tokens has no entry of {tokens}")
