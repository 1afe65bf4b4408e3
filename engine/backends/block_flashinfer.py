"""Block-sparse attention with FlashInfer, on CUDA.

Each KV head of each query is a sequence of its own, whose pages are tiles of one head: FlashInfer's kernel
reads the chosen blocks where they are. The host knows how many tokens a query sees, and not which. So one
plan per step serves all layers, and page ids are written where the plan will read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.backends.decode_attention import DecodeAttention
from engine.backends.flashinfer import FlashInferAttention, paged_wrapper, plan
from engine.backends.new_slots import NewSlots
from engine.backends.page_indices import FixedIndices, PageIndices
from engine.backends.query_blocks import query_blocks
from engine.backends.query_contexts import QueryContexts
from engine.backends.workspace import Workspace
from engine.batch import ForwardBatch
from engine.block_choice import BlockChoice, BlockInputs
from engine.cuda.block_scores_op import block_scores
from engine.device_copies import pinned, upload
from kvcache.indexed_pool import HeadsAsPages, IndexedKVCache


class FlashInferBlockAttention:
    """An AttentionBackend and AttendsBlocks. A step without a context that is longer than what a query sees
    is attended to like any other."""

    def __init__(
        self,
        pool: IndexedKVCache,
        query_heads: int,
        scale: float,
        choice: BlockChoice,
        whole: FlashInferAttention | DecodeAttention | None = None,
        workspace: torch.Tensor | None = None,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        """`fixed` is as in QueryContexts. `whole`: attends to whole contexts; it comes with a workspace."""
        self._pool, self._tiles = pool, HeadsAsPages(pool)
        self._query_heads, self._scale, self._choice = query_heads, scale, choice
        self._device = device = pool.data.device
        if whole is None:
            whole = FlashInferAttention(pool, query_heads, scale, workspace=workspace)
            workspace = whole.workspace
        assert workspace is not None, "that of the backend which has made `whole`"
        self._whole, self.workspace = whole, workspace
        self._planned = Workspace(device)
        self._contexts = QueryContexts(device, fixed)
        self._slots = NewSlots(pool.page_size, device, None if fixed is None else fixed[0])
        self._most_context = None if fixed is None else fixed[1] * pool.page_size
        self._sees_all = False
        # Of the pages that each head of each query sees: where they begin in `_pages`, and how many they are.
        self._runs = torch.zeros(2, 0, dtype=torch.int64, device=device)
        # All of them, and a place for those that no query sees.
        self._pages = torch.zeros(1, dtype=torch.int32, device=device)
        buffers = None
        if fixed is not None:
            rows = fixed[0] * choice.heads
            most = min(choice.top * choice.tokens // pool.page_size, fixed[1])
            self._pages = torch.zeros(rows * most + 1, dtype=torch.int32, device=device)
            self._runs = torch.zeros(2, rows, dtype=torch.int64, device=device)
            buffers = FixedIndices.allocate(rows, most, device)._replace(pages=self._pages)
        # What all layers of all steps use: heads, pages of a block, and pages that a query sees.
        self._heads = torch.arange(choice.heads, device=device)[:, None]
        self._of_block = torch.arange(choice.tokens // pool.page_size, device=device)
        self._order = torch.arange(choice.top * len(self._of_block), device=device)
        self._wrapper: Any = paged_wrapper(self._tiles, workspace, False, buffers)

    def fixed(self, sequences: int, context_pages: int) -> FlashInferBlockAttention:
        """This backend for recorded decode steps, as in FlashInferAttention."""
        assert isinstance(self._whole, FlashInferAttention)
        return FlashInferBlockAttention(
            self._pool,
            self._query_heads,
            self._scale,
            self._choice,
            self._whole.fixed(sequences, context_pages),
            self.workspace,
            (sequences, context_pages),
        )

    def prepare(self, batch: ForwardBatch) -> None:
        self._whole.prepare(batch)
        self._slots.fill(batch.out_slots)
        longest = int(batch.seq_lens.max(initial=0))
        self._sees_all = self._choice.holds(longest if self._most_context is None else self._most_context)
        if self._sees_all:
            return
        self._contexts.fill(batch)
        indices = self._indices(batch)
        runs = np.stack((indices.kv_starts[:-1], np.diff(indices.kv_starts))).astype(np.int64)
        total = int(indices.kv_starts[-1])
        if self._most_context is not None:
            self._runs.copy_(pinned(runs, self._device), non_blocking=True)
        else:
            self._runs = upload(runs, self._device)
            self._pages = torch.zeros(total + 1, dtype=torch.int32, device=self._device)
        heads = self._query_heads // self._choice.heads
        with self._planned.in_use():
            plan(self._wrapper, self._tiles, indices, self._pages[:total], heads, self._scale)

    def _indices(self, batch: ForwardBatch) -> PageIndices:
        """Of each head of each query, without its pages."""
        heads, page_size = self._choice.heads, self._pool.page_size
        seen = np.repeat(self._choice.tokens_seen(batch.positions), heads)
        kv_starts = np.zeros(len(seen) + 1, np.int32)
        np.cumsum(-(-seen // page_size), out=kv_starts[1:])
        q_starts = np.arange(len(seen) + 1, dtype=np.int32)
        last = ((seen - 1) % page_size + 1).astype(np.int32)
        return PageIndices(q_starts, kv_starts, np.zeros(0, np.int32), last, seen)

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._whole.forward(place, q, k_new, v_new, out, sinks)

    def attend_blocks(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        index: BlockInputs,
    ) -> None:
        pages, offsets = self._slots.pages, self._slots.offsets
        self._pool.write_index(place, pages, offsets, index.k)
        if self._sees_all:
            self._whole.forward(place, q, k_new, v_new, out)
            return
        self._pool.write(place, pages, offsets, k_new, v_new)
        self._choose(place, index)
        rows = len(q) * self._choice.heads
        of_layer = self._tiles.data[:, place * self._tiles.tiles_of_layer]
        query, attended = q.reshape(rows, -1, q.shape[-1]), out.view(rows, -1, q.shape[-1])
        self._wrapper.run(query.contiguous(), (of_layer[:, 0], of_layer[:, 1]), out=attended)

    def _choose(self, place: int, index: BlockInputs) -> None:
        """Write the pages that the heads of each query see."""
        choice, contexts, tiles = self._choice, self._contexts, self._tiles
        keys, q = self._pool.index[:, place], index.q.contiguous()
        pages_of_block = len(self._of_block)
        blocks = -(-contexts.page_table.shape[1] // pages_of_block)
        starts, counts = self._runs.view(2, -1, choice.heads, 1)
        for block in query_blocks(len(q), choice.heads * blocks):
            sequences, visible = contexts.sequences[block], contexts.visible[block]
            scores = torch.empty(len(visible), choice.heads, blocks, device=self._device)
            block_scores(q[block], keys, contexts.page_table, sequences, visible, scores, choice.tokens)
            chosen = choice.choose(scores, (visible.long() - 1) // choice.tokens)
            seen = (chosen[..., None] * pages_of_block + self._of_block).flatten(2)  # pages of the context
            ids = contexts.page_table[
                sequences[:, None, None], seen.clamp(max=contexts.page_table.shape[1] - 1)
            ]
            order = self._order[: seen.shape[2]]
            targets = torch.where(order < counts[block], starts[block] + order, len(self._pages) - 1)
            found = (ids * tiles.tiles_of_page + self._heads).int()
            self._pages.scatter_(0, targets.flatten(), found.flatten())
