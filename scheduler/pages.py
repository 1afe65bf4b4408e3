"""Pages: what the scheduler does with Memory. Everything that takes or gives slots, rows or locks is here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.common import alloc_token_slots, release_kv_cache
from kvcache.memory import Memory
from kvcache.radix_key import RadixKey
from scheduler.deferred import DeferredFrees
from scheduler.req import EMPTY_SLOTS, Req
from scheduler.running import RunningBatch


class Pages:
    """Rows, slots and locks of requests, and the frees that must wait for a forward."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.page_size = memory.page_size
        self.deferred = DeferredFrees(memory.allocator)
        self._pool = memory.req_to_token_pool
        self._req_to_token = memory.req_to_token_pool.req_to_token

    def free_tokens(self) -> int:
        """What can be had at once: free, plus cached and unlocked."""
        return self.memory.allocator.available_size() + self.memory.cache.evictable_size()

    def pages_of(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    # -- taking ------------------------------------------------------------------------------------

    def take(self, req: Req, match_len: int, total: int, spare: int) -> bool:
        """Lock what is cached of the first `match_len` tokens; give a row and slots for all `total`.

        Takes nothing and says False unless `spare` tokens stay free (or evictable) beyond that, and a row
        is there. All slots come at once: a prompt that was admitted never stops half-way for want of pages.
        """
        cache = self.memory.cache
        match = cache.match_prefix(RadixKey(req.fill_ids[:match_len], req.namespace, req.tenant))
        # Locking moves the matched pages from evictable to protected, so room is counted after it.
        cache.inc_lock_ref(match.last_device_node)
        prefix = len(match.device_indices)
        wanted = self.pages_of(total - prefix) * self.page_size
        if self.free_tokens() < wanted + spare or not self._pool.available_size():
            cache.dec_lock_ref(match.last_device_node)
            return False
        fresh = alloc_token_slots(self.memory, wanted)
        assert fresh is not None, "free and evictable tokens were counted, yet cannot be had"
        rows = self._pool.alloc(1)
        assert rows is not None, "a free row was counted, yet cannot be had"
        row = req.req_pool_idx = rows[0]
        self._req_to_token[row, :prefix] = match.device_indices
        # Rows name every slot of a page taken, used or not: decode steps inside a page then write none.
        end = min(prefix + wanted, self._pool.max_context_len)
        self._req_to_token[row, prefix:end] = fresh[: end - prefix]
        req.last_node = match.last_device_node
        req.prefix_indices = match.device_indices
        req.cache_protected_len = req.kv_committed_len = req.scheduled_len = prefix
        req.kv_allocated_len = end
        return True

    def grow(self, running: RunningBatch) -> bool:
        """Give every lane at a page border its next page. False, and nothing taken, when short."""
        lanes = running.at_page_border()
        if not len(lanes):
            return True
        page_size = self.page_size
        slots = alloc_token_slots(self.memory, len(lanes) * page_size)
        if slots is None:
            return False
        lens = running.lens[lanes]
        first_slots = slots[::page_size]
        running.page_table[lanes, lens // page_size] = first_slots // page_size
        if page_size == 1:
            self._req_to_token[running.rows[lanes], lens] = slots
        width = self._req_to_token.shape[1]
        for i, (lane, length) in enumerate(zip(lanes.tolist(), lens.tolist(), strict=True)):
            req = running.reqs[lane]
            end = req.kv_allocated_len = min(length + page_size, width)
            if page_size > 1:
                begin = i * page_size
                self._req_to_token[req.req_pool_idx, length:end] = slots[begin : begin + end - length]
        return True

    # -- caching and giving back -------------------------------------------------------------------

    def cache_prefix(self, req: Req, last_launch: int, chunked: bool = False) -> None:
        """Put the request's committed pages into the tree and lock them there.

        Duplicates of pages that another request cached first are freed; a forward that is still out may
        read them (it was built with the old page table), so then they wait for it.
        """
        if req.in_flight == 0:
            self.memory.cache.cache_unfinished_req(req, chunked)
            return
        allocator = self.memory.allocator
        allocator.free_group_begin()
        self.memory.cache.cache_unfinished_req(req, chunked)
        self.deferred.hold(allocator.free_group_take(), last_launch)

    def cut_points(self, req: Req, total: int) -> tuple[int, ...]:
        """Lengths below `total` at which the cache wants a forward of this request to end."""
        return self.memory.cache.cut_points(req, total)

    def slots(self, req: Req, total: int) -> npt.NDArray[np.int32]:
        """Slots of the request's first `total` tokens, a view."""
        return self._req_to_token[req.req_pool_idx, :total]

    def release(self, req: Req, is_insert: bool) -> None:
        """Give everything back: pages into the tree (unlocked) or free, the row free. No forward is out."""
        assert req.in_flight == 0, f"{req} is in a launched forward"
        release_kv_cache(self.memory, req, is_insert=is_insert)
        req.forget_memory()

    def split_reservation(self, req: Req) -> npt.NDArray[np.int64]:
        """Give back row and lock of a reservation; its page ids are returned, still taken."""
        pages = req.reserved_pages
        self.memory.cache.dec_lock_ref(req.last_node)
        assert req.req_pool_idx is not None
        self._pool.free(req.req_pool_idx)
        req.forget_memory()
        return pages

    def private_pages(self, req: Req) -> npt.NDArray[np.int64]:
        """Pages that this request holds outside the tree."""
        if req.req_pool_idx is None:
            return EMPTY_SLOTS
        row = self._req_to_token[req.req_pool_idx, req.cache_protected_len : req.kv_allocated_len]
        return np.unique(row.astype(np.int64) // self.page_size)
