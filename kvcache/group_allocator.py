"""GroupAllocator: pages of one KV group for live requests. When too few are free, the tree evicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages


class Evictable(Protocol):
    """What is cached and can be given up: the tree."""

    def evict(self, group: str, pages: int) -> int:
        """Free at least `pages` pages of a group, or all that can be freed; returns how many were."""
        ...

    def evictable(self, group: str) -> int:
        """Pages of a group that `evict` can free."""
        ...


class GroupAllocator:
    """One group's `allocator` and what the tree can free for it. One thread.

    The content of a page that was allocated is whatever was last written to it.
    """

    def __init__(self, group: str, allocator: BaseTokenToKVPoolAllocator, cached: Evictable) -> None:
        self.group = group
        self.allocator = allocator
        self._cached = cached

    def available_pages(self) -> int:
        """Pages that can be allocated: free ones, and cached ones without a lock."""
        return self.allocator.available_pages() + self._cached.evictable(self.group)

    def alloc(self, n: int) -> Pages | None:
        """`n` pages. None, and no page is allocated, if there are too few; some may have been evicted."""
        self.make_room(n)
        return self.allocator.alloc_pages(n)

    def make_room(self, n: int) -> None:
        """Evict until `n` pages are free, or nothing more can be evicted."""
        short = n - self.allocator.available_pages()
        if short > 0:
            self._cached.evict(self.group, short)

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, each once."""
        self.allocator.free_page_ids(np.array(pages, np.int32))
