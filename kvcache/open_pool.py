"""The pool of a group of any kind."""

from __future__ import annotations

import torch

from kvcache.buffers import PoolBuffer
from kvcache.entry_layout import EntryGroupSpec
from kvcache.indexed_layout import IndexedKVGroupSpec
from kvcache.indexed_pool import IndexedKVCache
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec, StateGroupSpec
from kvcache.pool import EntryKVCache, KVCache, MambaPool, MHAKVCache, MLAKVCache


def open_pool(
    spec: GroupSpec,
    num_pages: int,
    page_size: int,
    device: str | torch.device = "cpu",
    buffer: PoolBuffer | None = None,
) -> KVCache:
    """The pool of a group of any kind; of a state group pages are slots."""
    if isinstance(spec, StateGroupSpec):
        return MambaPool(spec, num_pages, device, buffer)
    if isinstance(spec, IndexedKVGroupSpec):
        return IndexedKVCache(spec, num_pages, page_size, device, buffer)
    if isinstance(spec, LatentGroupSpec):
        return MLAKVCache(spec, num_pages, page_size, device, buffer)
    if isinstance(spec, EntryGroupSpec):
        return EntryKVCache(spec, num_pages, page_size, device, buffer)
    assert isinstance(spec, KVGroupSpec), f"a {spec.kind} group"
    return MHAKVCache(spec, num_pages, page_size, device, buffer)
