"""IndexedKVGroupSpec: keys and values per head, and beside them a key of each token for an indexer.

Block-sparse attention (MiniMax-M3) chooses blocks of a context by such keys. A token's key lives as long as
its keys and values do, so that it is in the same page (docs/decisions/0074).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from common.errors import ConfigError
from kvcache.layout import KVGroupSpec


@dataclass(frozen=True)
class IndexedKVGroupSpec(KVGroupSpec):
    """A page holds the tiles of all layers and heads, as a KVGroupSpec has them, and then `[layer, page_size,
    index_dim]`: the indexer's keys in the model's dtype, however keys and values are stored. Layers without
    an indexer do not use theirs. Where heads are divided among ranks, each rank has all of these."""

    index_dim: int = 0

    def tiles_shape(self, page_size: int) -> tuple[int, ...]:
        """Of the heads in a page, `[layer, 2 (K, V), head, page_size, head_dim]` as stored."""
        return super().page_shape(page_size)

    def tail_bytes(self, page_size: int) -> int:
        """Bytes of the index keys of a page."""
        return len(self.layer_ids) * page_size * self.index_dim * self.dtype.itemsize

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """`[bytes]`. Raises ConfigError if index keys would not be aligned in it."""
        tiles = prod(self.tiles_shape(page_size)) * self.element.itemsize
        if tiles % self.dtype.itemsize:
            raise ConfigError(
                "page_size",
                f"{tiles} bytes of {self.stored} heads are no whole values of an index key",
                "use another power of two",
            )
        return (tiles + self.tail_bytes(page_size),)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: all layers, contiguous."""
        return self.page_shape(page_size)[0]

    @property
    def stored_dtype(self) -> str:
        """It names the parts of a page, so that equal layouts mean equal pages."""
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{len(self.layer_ids)}x{self.kv_heads}x{self.head_dim}"
        return f"{super().stored_dtype} heads={heads} index={self.index_dim}:{dtype}"
