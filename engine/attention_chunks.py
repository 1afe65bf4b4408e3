"""Chunked attention: a query sees the tokens of its own chunk alone, up to itself (Llama 4).

Chunk i of a sequence is its tokens [i * tokens, (i + 1) * tokens). What a step computes of one chunk is
attention of a sequence that begins there, so that every backend computes it unchanged. A mask in each backend
was the alternative. vLLM and SGLang cut the batch, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from common.errors import ConfigError
from engine.batch import ForwardBatch


@dataclass(frozen=True)
class AttentionChunks:
    """Chunks of `tokens` tokens. Raises ConfigError if a page may hold tokens of two chunks."""

    tokens: int
    page_size: int

    def __post_init__(self) -> None:
        if self.tokens % self.page_size:
            raise ConfigError(
                "page_size",
                f"pages of {self.page_size} tokens do not divide attention_chunk_size {self.tokens}",
                f"use a power of two that divides {self.tokens}",
            )

    def of(self, batch: ForwardBatch) -> ForwardBatch:
        """The same new tokens, as sequences that begin where their chunks do: q_lens, seq_lens and page_table
        are theirs. `positions` stay those of the whole sequences. A decode row stays one sequence."""
        ends = batch.seq_lens.astype(np.int64)
        begins = ends - batch.q_lens
        if not ends.size or ends.max() <= self.tokens:
            return batch
        firsts = begins // self.tokens
        counts = (ends - 1) // self.tokens - firsts + 1  # chunks of each sequence with new tokens
        lasts = np.cumsum(counts)
        whole = np.repeat(np.arange(len(ends)), counts)
        chunks = firsts[whole] + np.arange(lasts[-1]) - (lasts - counts)[whole]
        starts = chunks * self.tokens
        stops = np.minimum(ends[whole], starts + self.tokens)
        seq_lens = (stops - starts).astype(np.int32)
        q_lens = (stops - np.maximum(begins[whole], starts)).astype(np.int32)
        pages = np.arange(-(-int(seq_lens.max()) // self.page_size))
        logical = starts[:, None] // self.page_size + pages
        # A last chunk may end before the others do: its further entries are not read.
        logical = np.minimum(logical, batch.page_table.shape[1] - 1)
        return replace(
            batch,
            rows=batch.rows[whole],
            q_lens=q_lens,
            seq_lens=seq_lens,
            page_table=batch.page_table[whole[:, None], logical],
            sampled=(lasts[batch.sampled] - 1).astype(np.int32),
            window=None,
            state=None,
            scored=(),
            pooled=(),
        )
