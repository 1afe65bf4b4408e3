"""Pools of keys and values with an indexer's keys beside them (kvcache/indexed_layout.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcache.buffers import PoolBuffer
from kvcache.indexed_layout import IndexedKVGroupSpec
from kvcache.layout import KVGroupSpec
from kvcache.pool import KVCache, MHAKVCache


class IndexedKVCache(MHAKVCache):
    """`data` is as in MHAKVCache; `index[page, layer, offset, index_dim]` are the indexer's keys."""

    def __init__(
        self,
        spec: IndexedKVGroupSpec,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        buffer: PoolBuffer | None = None,
    ) -> None:
        KVCache.__init__(self, spec, num_pages, page_size, device, buffer)
        end = self.page_bytes - spec.tail_bytes(page_size)
        tiles, index = self.bytes[:, :end].view(spec.element), self.bytes[:, end:].view(spec.dtype)
        self._show(spec, tiles.view(num_pages + 1, *spec.tiles_shape(page_size)))
        self.index = index.view(num_pages + 1, len(spec.layer_ids), page_size, spec.index_dim)

    def write_index(self, place: int, pages: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor) -> None:
        """Write the indexer's `keys` `[tokens, index_dim]` as write() does keys and values."""
        assert keys.dtype == self.spec.dtype, f"{keys.dtype} into a pool of {self.spec.dtype}"
        self.index[pages, place, offsets] = keys

    def has_whole_tiles(self) -> bool:
        """Whether a page is as large as some tiles of a head."""
        return self.data.stride(0) % self.data.stride(3) == 0


class HeadsOfIndexedKVCache(IndexedKVCache):
    """Some heads of another IndexedKVCache, in its memory, and all index keys: what one of several ranks
    reads and writes."""

    def __init__(self, whole: IndexedKVCache, heads: range) -> None:
        spec = whole.spec
        buffer = PoolBuffer(whole.bytes.view(-1))
        KVCache.__init__(self, spec, whole.num_pages, whole.page_size, whole.device, buffer)
        self._show(replace(spec, kv_heads=len(heads)), whole.data[:, :, :, heads.start : heads.stop])
        self.index = whole.index


class HeadsAsPages(MHAKVCache):
    """The tiles of an IndexedKVCache, in its memory, as pages of one head.

    A page of this pool is a head's keys in one page and layer of the other; its values are where the other
    has them. So each head of a sequence may have a page table of its own. Layers are `tiles_of_layer` places
    apart, pages `tiles_of_page` pages.
    """

    def __init__(self, whole: IndexedKVCache) -> None:
        assert whole.has_whole_tiles()
        spec, (page, layer, side, tile, row, _) = whole.spec, whole.data.stride()
        self.tiles_of_layer = layer // tile
        self.tiles_of_page = page // tile
        one = KVGroupSpec((0,), 1, spec.head_dim, spec.dtype, stored=spec.stored)
        buffer = PoolBuffer(whole.bytes.view(-1))
        KVCache.__init__(self, spec, whole.num_pages, whole.page_size, whole.device, buffer)
        pages = whole.num_pages * self.tiles_of_page + spec.kv_heads
        places = (len(spec.layer_ids) - 1) * self.tiles_of_layer + 1
        sizes = (pages, places, 2, 1, *whole.data.shape[-2:])
        self._show(one, whole.data.as_strided(sizes, (tile, tile, side, tile, row, 1)))
