"""Compressed attention in plain torch (engine/compressed.py), on every device.

Each query gathers the rows that it attends to: those of its window and the entries before it, or the best of
these. So a step has the same form whatever sequences it is of, and a decode step can be recorded.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import torch

from engine.backends.closing_tokens import ClosingTokens
from engine.backends.new_slots import NewSlots
from engine.backends.query_blocks import query_blocks
from engine.backends.query_contexts import QueryContexts, SequencePages
from engine.batch import ForwardBatch
from engine.paged_layers import Compression, Compressor, IndexQueries
from kvcache.pool import EntryKVCache


class TorchCompressedAttention:
    """A CompressedBackend. Scores and attention are float32."""

    def __init__(
        self,
        entries: EntryKVCache,
        window: EntryKVCache,
        scale: float,
        compressions: Collection[Compression],
        fixed: tuple[int, int] | None = None,
    ) -> None:
        """`compressions`: how the layers make their entries. `fixed` is as in QueryContexts."""
        assert window.spec.window is not None
        self._entries = entries
        self._window = window
        self._window_tokens = window.spec.window
        self._scale = scale
        self._page_size = entries.page_size
        device = window.device
        self._sequences = None if fixed is None else fixed[0]
        self._contexts = QueryContexts(device, fixed)
        self._window_table = SequencePages(device, fixed)
        self._slots = NewSlots(self._page_size, device, self._sequences)
        self._closing = {
            one: ClosingTokens(one, self._page_size, device, self._sequences) for one in compressions
        }
        self._longest = 0 if fixed is None else fixed[1] * self._page_size  # tokens that a query may see

    def fixed(self, sequences: int, context_pages: int) -> Self:
        """This backend for recorded decode steps, as in FlashInferAttention."""
        shape = sequences, context_pages
        return type(self)(self._entries, self._window, self._scale, tuple(self._closing), shape)

    def prepare(self, batch: ForwardBatch) -> None:
        of_window = batch.for_window()
        self._contexts.fill(batch)
        self._window_table.fill(of_window.page_table)
        self._slots.fill(of_window.out_slots)
        for closing in self._closing.values():
            closing.fill(batch, of_window.page_table)
        if self._sequences is None:
            self._longest = int(batch.seq_lens.max(initial=0))

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor,
        compressor: Compressor | None = None,
        index: IndexQueries | None = None,
    ) -> None:
        self._window.rows(layer)[self._slots.pages, self._slots.offsets] = rows
        if compressor is not None:
            self._close(layer, compressor)
        self._attend(layer, q, out, sinks, None if compressor is None else compressor.compression, index)

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor,
        compression: Compression | None,
        index: IndexQueries | None,
    ) -> None:
        """forward() when all rows and entries are in their pages."""
        width = q.shape[-1]
        column = sinks.float()[:, None]  # [heads, 1]
        for block in query_blocks(len(q), max(q.shape[1:]) * self._most_rows(compression)):
            attended, is_seen = self._of_window(layer, block, width)
            if compression is not None:
                parts = self._of_entries(layer, block, width, compression, index)
                attended = torch.cat((attended, parts[0]), dim=1)
                is_seen = torch.cat((is_seen, parts[1]), dim=1)
            scores = q[block].float() @ attended.transpose(1, 2) * self._scale  # [n, heads, rows]
            scores.masked_fill_(~is_seen[:, None], -torch.inf)
            weights = torch.cat((column.expand(len(scores), -1, -1), scores), dim=-1).softmax(-1)
            out[block] = (weights[..., 1:] @ attended).to(out.dtype)

    def _close(self, layer: int, compressor: Compressor) -> None:
        """Write the entries that end with a new token."""
        closing = self._closing[compressor.compression]
        if not closing.count:
            return
        sources = closing.source_pages, closing.source_offsets
        entries = compressor.entries(self._window.rows(layer)[sources], closing.firsts)
        self._entries.rows(layer)[closing.pages, closing.rows] = entries

    def _most_rows(self, compression: Compression | None) -> int:
        """That a query gathers."""
        entries = 0 if compression is None else self._longest // compression.tokens
        return self._window_tokens + entries

    def _of_window(self, layer: int, block: slice, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, tokens, width], and which of them each query sees, bool [n, tokens]."""
        contexts, size = self._contexts, min(self._window_tokens, self._longest)
        visible, sequences = contexts.visible[block], contexts.sequences[block]
        tokens = visible[:, None] - size + torch.arange(size, device=visible.device)
        is_seen = tokens >= 0
        tokens = tokens.clamp(min=0)
        pages = self._window_table.ids[sequences[:, None], tokens // self._page_size]
        rows = self._window.rows(layer)[..., :width]
        return rows[pages, tokens % self._page_size].float(), is_seen

    def _of_entries(
        self, layer: int, block: slice, width: int, compression: Compression, index: IndexQueries | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of entries: all that a query may see, or the best of them."""
        visible = self._contexts.visible[block] // compression.tokens
        count = self._longest // compression.tokens
        numbers = torch.arange(count, device=visible.device).expand(len(visible), -1)
        rows = self._entries.rows(layer)
        if index is not None and (top := self._top(compression)) is not None:
            keys, is_seen = self._gather(rows[..., width:], numbers, block, compression)
            scores = torch.einsum("nhd,ncd->nhc", index.q[block].float(), keys).relu_()
            scores = torch.einsum("nh,nhc->nc", index.weights[block], scores)
            numbers = scores.masked_fill_(~is_seen, -torch.inf).topk(top).indices
        return self._gather(rows[..., :width], numbers, block, compression)

    def _top(self, compression: Compression) -> int | None:
        """How many entries a query attends to, if in this step it may see more."""
        top = compression.top
        return None if top is None or top >= self._longest // compression.tokens else top

    def _gather(
        self, rows: torch.Tensor, numbers: torch.Tensor, block: slice, compression: Compression
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries [n, k] of each query's sequence: float32 [n, k, width], zeros for those that it does not
        see, and which it sees. Memory that no entry was written to may hold anything."""
        contexts = self._contexts
        is_seen = numbers < (contexts.visible[block] // compression.tokens)[:, None]
        last = (numbers + 1) * compression.tokens - 1
        pages = contexts.page_table[contexts.sequences[block][:, None], last // self._page_size]
        gathered = rows[pages, last % self._page_size // compression.tokens].float()
        return gathered.masked_fill_(~is_seen[..., None], 0), is_seen
