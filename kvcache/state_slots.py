"""StateSlotPool: the slots of the state group, for running requests and for the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcache.allocator import TokenToKVPoolAllocator


class StateSlotPool:
    """Slots 1..num_slots. One thread. A slot's content is whatever was last written to it."""

    def __init__(self, allocator: TokenToKVPoolAllocator) -> None:
        self.allocator = allocator
        self.evict: Callable[[int], int] = lambda _: 0  # the cache's evict_mamba
        self.evictable_slots: Callable[[], int] = lambda: 0  # the cache's

    def available_slots(self) -> int:
        """Slots that can be had: free, or cached and unlocked."""
        return self.allocator.available_pages() + self.evictable_slots()

    def alloc(self, n: int) -> list[int] | None:
        """`n` slots, evicting cached states for them if need be. None, and nothing taken, when short."""
        short = n - self.allocator.available_pages()
        if short > 0:
            self.evict(short)
        slots = self.allocator.alloc_pages(n)
        return None if slots is None else slots.tolist()

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back, each once."""
        self.allocator.free_page_ids(np.array(slots, np.int32))
