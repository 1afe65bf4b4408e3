"""The interface of both sides of bench.radix, and our side. `hit`, `insert_key` and `evict` are timed."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.allocator import make_allocator
from kvcache.components.full import FullComponent
from kvcache.pool import ReqToTokenPool
from kvcache.radix_cache import RadixCache
from kvcache.radix_key import Namespace, RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.tenancy.config import TenancyConfig
from kvcache.tenancy.promotion import Promotion

Tokens = npt.NDArray[np.int32]


class Tree(Protocol):
    """A prefix cache under test."""

    def key(self, tokens: Tokens) -> Any:
        """The key that a request is looked up by."""
        ...

    def hit(self, key: Any) -> None:
        """Match, take the indices, lock and unlock the last node."""
        ...

    def insert(self, tokens: Tokens) -> None:
        """Cache these tokens: `reserve` and `insert_key`."""
        ...

    def reserve(self, key: Any) -> None:
        """Get memory for `insert_key`; not timed."""
        ...

    def insert_key(self, key: Any) -> None:
        """Cache a key with the memory reserved for it."""
        ...

    def evict(self, tokens: int) -> int:
        """Free that many tokens in lru order; returns how many were freed."""
        ...


class BatonTree:
    """Our tree, without a pool behind its page ids."""

    def __init__(self, page_size: int, tokens: int, shares: bool = False) -> None:
        """`shares`: tenants share pages."""
        self._page_size = page_size
        spare = tokens // 8 + (1 << 16)
        self._allocator = make_allocator((tokens + spare) // page_size, page_size)
        tree = RadixTree(page_size, [FullComponent("full", self._allocator, "lru")], shares=shares)
        promotion = Promotion(tree, TenancyConfig(users=2)) if shares else None
        self.cache = RadixCache(ReqToTokenPool(1, page_size), self._allocator, tree, promotion=promotion)
        self._namespace = Namespace("bench")
        self._pages = np.empty(0, np.int32)

    def key(self, tokens: Tokens, tenant: str = "") -> RadixKey:
        return RadixKey(tokens, self._namespace, tenant)

    def hit(self, key: RadixKey) -> None:
        match = self.cache.match_prefix(key)
        _ = match.device_indices
        self.cache.inc_lock_ref(match.last_device_node)
        self.cache.dec_lock_ref(match.last_device_node)

    def insert(self, tokens: Tokens, tenant: str = "") -> None:
        key = self.key(tokens, tenant)
        self.reserve(key)
        self.insert_key(key)

    def reserve(self, key: RadixKey) -> None:
        """Pages for all of it, as if it had been computed without the cache."""
        pages = self._allocator.alloc_pages(len(key) // self._page_size)
        assert pages is not None, "the bench's pool is too small"
        self._pages = pages

    def insert_key(self, key: RadixKey) -> None:
        """Insert, and free what the tree had already."""
        inserted = self.cache.insert(key, self._pages)
        self._allocator.free_page_ids(self._pages[: inserted.prefix_len // self._page_size])

    def evict(self, tokens: int) -> int:
        return self.cache.tree.evict("full", tokens // self._page_size) * self._page_size
