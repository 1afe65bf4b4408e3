"""Index keys of k-pools: the key of a k-pool is where the key of its last token was.

A token's row has its index key and what weighs it. When a k-pool is whole, its key is made of its tokens'
rows, which are in pages whoever wrote them, and needs no place of its own: the last token's key is not read
again.
"""

from __future__ import annotations

from engine.backends.closing_tokens import ClosingTokens
from engine.batch import ForwardBatch
from engine.paged_layers import Compression, SumsUp
from kvcache.pool import MLAKVCache


class KPoolKeys:
    """Makes the keys of k-pools that the new tokens of a step complete. `fixed` is as in ClosingTokens."""

    def __init__(self, pool: MLAKVCache, tokens: int, fixed: int | None = None) -> None:
        self._pool = pool
        whole = Compression(tokens, tokens, None)
        self._closing = ClosingTokens(whole, pool.page_size, pool.data.device, fixed)

    def fill(self, batch: ForwardBatch) -> None:
        """Those of the next step."""
        self._closing.fill(batch, batch.page_table)

    def close(self, place: int, sums_up: SumsUp) -> None:
        """After the new tokens' rows are written."""
        closing = self._closing
        if closing.count == 0:
            return
        rows = self._pool.read_index(place, closing.source_pages, closing.source_offsets)
        self._pool.write_index(place, closing.pages, closing.source_offsets[:, -1], sums_up(rows))
