"""Sparse latent attention with FlashInfer, on CUDA.

Each query is a sequence of its own, and each token that it attends to is a page of one token. So FlashInfer's
kernel of latent attention reads the chosen rows where they are, in any order, and one plan per step serves
all layers: it depends on how many rows a query attends to, not on which.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.backends.flashinfer_limits import check_latent_step
from engine.backends.kpool_keys import KPoolKeys
from engine.backends.latent_wrapper import LatentWrapper
from engine.backends.new_slots import NewSlots
from engine.backends.page_indices import FixedIndices
from engine.backends.query_blocks import query_blocks
from engine.backends.query_contexts import QueryContexts
from engine.batch import ForwardBatch
from engine.cuda.index_op import index_scores
from engine.paged_layers import IndexInputs
from engine.token_choice import TokenChoice
from kvcache.pool import MLAKVCache


class FlashInferSparseAttention:
    """A LatentBackend and SelectsTokens."""

    def __init__(
        self,
        pool: MLAKVCache,
        heads: int,
        scale: float,
        choice: TokenChoice,
        workspace: torch.Tensor | None = None,
        fixed: tuple[int, int] | None = None,
        has_sinks: bool = False,
    ) -> None:
        """`fixed` is as in QueryContexts, the rest as in LatentWrapper."""
        self._pool = pool
        self._heads = heads
        self._scale = scale
        self._choice = choice
        self._has_sinks = has_sinks
        self._device = pool.data.device
        self._contexts = QueryContexts(self._device, fixed)
        self._slots = NewSlots(pool.page_size, self._device, None if fixed is None else fixed[0])
        self._kpool_keys = KPoolKeys(pool, choice.kpool, None if fixed is None else fixed[0])
        buffers = None if fixed is None else FixedIndices.allocate(fixed[0], choice.most, self._device)
        self._wrapper = LatentWrapper(pool, heads, scale, workspace, buffers, has_sinks)
        # Of the rows that each query attends to, [T * most], in the first layer of their pages.
        nothing = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._rows = nothing if buffers is None else buffers.pages

    def fixed(self, sequences: int, context_pages: int) -> FlashInferSparseAttention:
        """This backend for recorded decode steps, as in FlashInferAttention."""
        return FlashInferSparseAttention(
            self._pool,
            self._heads,
            self._scale,
            self._choice,
            self._wrapper.workspace,
            (sequences, context_pages),
            self._has_sinks,
        )

    def check_step(self, tokens: int, sequences: int) -> None:
        """See LimitsSteps."""
        del sequences
        check_latent_step(self._device, self._heads, tokens, tokens)

    def prepare(self, batch: ForwardBatch) -> None:
        self._slots.fill(batch.out_slots)
        self._contexts.fill(batch)
        if self._choice.kpool > 1:
            self._kpool_keys.fill(batch)
        count, most = len(batch.positions), self._choice.most
        if len(self._rows) != count * most:  # never of a recorded step
            self._rows = torch.zeros(count * most, dtype=torch.int32, device=self._device)
        starts = np.arange(count + 1, dtype=np.int32)
        lengths = self._choice.seen(batch.positions)
        self._wrapper.plan(starts, starts * most, self._rows, lengths, page_size=1)

    def select(self, place: int, inputs: IndexInputs) -> None:
        pool, contexts, choice = self._pool, self._contexts, self._choice
        pool.write_index(place, self._slots.pages, self._slots.offsets, inputs.k)
        if inputs.sums_up is not None:
            self._kpool_keys.close(place, inputs.sums_up)
        first = pool.spec.key_dim
        # Of each k-pool the row of its last token.
        keys = pool.data[:, place, choice.kpool - 1 :: choice.kpool, first : first + inputs.q.shape[-1]]
        rows_of_page = pool.page_size * len(pool.spec.layer_ids)
        context = contexts.page_table.shape[1] * pool.page_size
        kpools, best = context // choice.kpool, choice.kpools(context)
        q, weights = inputs.q.contiguous(), inputs.weights.contiguous()
        rows = self._rows.view(-1, choice.most)
        for block in query_blocks(len(q), kpools):
            sequences, visible = contexts.sequences[block], contexts.visible[block]
            scores = torch.empty(len(visible), kpools, dtype=torch.float32, device=self._device)
            seen = visible if choice.kpool == 1 else visible // choice.kpool
            index_scores(q[block], weights[block], keys, contexts.page_table, sequences, seen, scores)
            # In order: those that a query does not see come last.
            chosen = choice.tokens(scores.topk(best).indices, visible)
            pages = contexts.page_table[sequences[:, None], chosen // pool.page_size]
            rows[block, : chosen.shape[1]] = pages * rows_of_page + chosen % pool.page_size

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
        rows = self._pool.data.view(-1, 1, self._pool.spec.row_dim)[place * self._pool.page_size :]
        self._wrapper.run(q_latent, q_rope, rows, out, sinks)
