"""Block-sparse attention on CPUs: torch chooses blocks, and the C++ op attends to them where they are.

Each KV head of each query is a sequence of its own to the op, whose pages are tiles of one head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.backends.block_limits import check_blocks
from engine.backends.block_reference import chosen_blocks
from engine.backends.query_blocks import query_blocks
from engine.batch import ForwardBatch
from engine.block_choice import BlockChoice, BlockInputs
from engine.cpu.attention import CpuAttention
from kvcache.indexed_pool import HeadsAsPages, IndexedKVCache


class CpuBlockAttention(CpuAttention):
    """An AttentionBackend and AttendsBlocks. A step without a context that is longer than what a query sees
    is attended to like any other."""

    def __init__(self, pool: IndexedKVCache, query_heads: int, scale: float, choice: BlockChoice) -> None:
        """Raises KernelsUnavailable as CpuAttention does, and BackendUnavailable as check_blocks does."""
        super().__init__(pool, query_heads, scale)
        check_blocks(pool, choice)
        self._indexed = pool
        self._choice = choice
        self._tiles = HeadsAsPages(pool)
        self._of_tiles = CpuAttention(self._tiles, query_heads // choice.heads, scale)
        self._starts: list[int] = []  # of each sequence's queries, and their end
        self._contexts: list[tuple[int, torch.Tensor]] = []  # of each sequence its length and int64 pages
        self._of_heads: ForwardBatch | None = None  # each KV head of each query a sequence, without its pages

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self._slots = torch.from_numpy(batch.out_slots)
        self._sees_all = self._choice.holds(int(batch.seq_lens.max(initial=0)))
        if self._sees_all:
            return
        heads, page_size = self._choice.heads, self._indexed.page_size
        self._starts = batch.starts().tolist()
        tables = torch.from_numpy(batch.page_table).long()
        lengths = batch.seq_lens.tolist()
        self._contexts = [(n, table[: -(-n // page_size)]) for n, table in zip(lengths, tables, strict=True)]
        pages, offsets = np.divmod(batch.out_slots, page_size)
        tiles = pages[:, None] * self._tiles.tiles_of_page + np.arange(heads)
        self._of_heads = replace(
            batch,
            q_lens=np.ones(tiles.size, np.int32),
            seq_lens=np.repeat(self._choice.tokens_seen(batch.positions), heads),
            out_slots=(tiles * page_size + offsets[:, None]).ravel(),
        )

    def attend_blocks(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        index: BlockInputs,
    ) -> None:
        page_size = self._indexed.page_size
        self._indexed.write_index(place, self._slots // page_size, self._slots % page_size, index.k)
        if self._sees_all:
            self.forward(place, q, k_new, v_new, out)
            return
        heads, dim = k_new.shape[1:]
        assert self._of_heads is not None
        self._of_tiles.prepare(replace(self._of_heads, page_table=self._chosen_tiles(place, index)))
        of_groups, attended = (x.reshape(len(x) * heads, -1, dim) for x in (q, out))
        k, v = (x.reshape(-1, 1, dim) for x in (k_new, v_new))
        self._of_tiles.forward(place * self._tiles.tiles_of_layer, of_groups, k, v, attended)

    def _chosen_tiles(self, place: int, index: BlockInputs) -> np.ndarray:
        """int32 [T x heads, pages]: the tiles of each head's blocks, one after the other."""
        choice, starts = self._choice, self._starts
        heads = torch.arange(choice.heads)[:, None, None]
        pages_of_block = torch.arange(choice.tokens // self._indexed.page_size)
        most = choice.top * len(pages_of_block)
        tiles = torch.zeros(*index.q.shape[:2], most, dtype=torch.int32)
        for i, (length, pages) in enumerate(self._contexts):
            keys = self._indexed.index[pages, place].flatten(0, 1)[:length].float()
            new = starts[i + 1] - starts[i]
            for block in query_blocks(new, len(heads) * length):
                queries = slice(starts[i] + block.start, starts[i] + block.stop)
                positions = torch.arange(block.start, block.stop) + length - new
                chosen = chosen_blocks(choice, index.q[queries], keys, positions)
                numbers = chosen[..., None] * len(pages_of_block) + pages_of_block
                # Those past the end are not read.
                found = pages[numbers.clamp(max=len(pages) - 1)] * self._tiles.tiles_of_page + heads
                tiles[queries, :, : found.shape[2] * found.shape[3]] = found.flatten(2).int()
        return tiles.flatten(0, 1).numpy()
