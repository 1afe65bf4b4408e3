"""Pages: allocation and release of rows, slots and locks for the scheduler's requests.

A request holds, by group:

    full or latent   slots for all of its prefill, allocated at once; then a page at each page border
    window           from the first page that its next query sees to the page of its newest token (memory.swa)
    state            a pair of slots (req.state_hold)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.base_prefix_cache import MatchResult
from kvcache.common import alloc_for_decode, alloc_for_extend, release_kv_cache
from kvcache.memory import GroupPages, Memory
from kvcache.radix_key import RadixKey
from kvcache.request import STATE_PAIR, StateHold, state_slot
from scheduler.deferred import DeferredFrees
from scheduler.rates import Rates
from scheduler.req import Req
from scheduler.running import RunningBatch
from scheduler.tier_waits import TierWaits


class Capacity(NamedTuple):
    """An amount of memory that grows with requests' contexts."""

    tokens: int  # of the primary group, whole pages
    window_pages: int


class Pages:
    """Rows, slots and locks of requests, and frees that must wait for a forward."""

    def __init__(self, memory: Memory, rates: Rates) -> None:
        self.memory = memory
        self.page_size = memory.page_size
        self.window = memory.swa
        self.states = memory.states
        self.deferred = DeferredFrees(memory)
        self.lower = TierWaits(memory.tiers, rates)
        self.offload_stride = _offload_stride(memory)
        self._primary = memory.specs[0].name
        self._pool = memory.req_to_token_pool
        self._req_to_token = memory.req_to_token_pool.req_to_token

    def free_tokens(self) -> int:
        """Tokens of the primary group that can be allocated now: free ones, and cached ones without a
        lock."""
        return self.memory.primary.available_pages() * self.page_size

    def pages_of(self, tokens: int) -> int:
        """Pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def window_pages(self, req: Req) -> int:
        """Window pages that the request holds or locks."""
        if self.window is None or req.req_pool_idx is None:
            return 0
        return self.window.held_pages(req.req_pool_idx)

    def more_requests(self, window_pages: int, promised: int) -> int:
        """How many more requests there are rows and state slots for, and `window_pages` each besides the
        `promised` ones."""
        limits = [self._pool.available_size()]
        if self.window is not None:
            limits.append((self.window.available_pages() - promised) // window_pages)
        if self.states is not None:
            limits.append(self.states.available_pages() // STATE_PAIR)
        return min(limits)

    # -- taking ------------------------------------------------------------------------------------

    def take(self, req: Req, match_len: int, spare: Capacity) -> bool:
        """Lock what is cached of the first `match_len` tokens and allocate what else the prefill needs.

        False, and nothing is allocated, unless there is a row and `spare` stays free (or evictable) besides.
        The request's own window pages are part of `spare`. The primary group's slots are allocated at once:
        an admitted prompt never stops half-way because there are too few.
        """
        key = self.key(req, match_len)
        match = self.memory.cache.match_prefix(key)
        if self.lower.wants(match):
            if self.brings_back(req, match, spare, req.prefill_len):
                return False
            match = self.memory.cache.match_prefix(key)  # a load that found no room may have evicted of it
        if not self.take_slots(req, match, len(match.device_indices), spare, req.prefill_len):
            return False
        tell_admitted(self, req)
        return True

    def brings_back(self, req: Req, match: MatchResult, spare: Capacity, extent: int) -> bool:
        """Whether the request, which needs `extent` tokens, must wait because what the host has of its match
        is being loaded."""
        if not self.lower.wants(match):
            return False
        wanted = self.pages_of(extent - len(match.device_indices)) * self.page_size
        fits = self.lower.loaded_pages(req) > 0 or (
            self._pool.available_size() > 0
            and self._has_room(wanted + spare.tokens)
            and (self.window is None or self.window.available_pages() >= spare.window_pages)
        )
        return self.lower.brings_back(req, match, fits)

    def _has_room(self, tokens: int) -> bool:
        """Whether so many tokens can be had, if need be of what was loaded for others."""
        return self.free_tokens() >= tokens or (self.lower.makes_room() and self.free_tokens() >= tokens)

    @staticmethod
    def key(req: Req, length: int) -> RadixKey:
        """What the cache knows the request's first `length` tokens by."""
        return RadixKey(req.fill_ids[:length], req.namespace, req.tenant_key, req.marks)

    def take_slots(self, req: Req, match: MatchResult, starts_at: int, spare: Capacity, extent: int) -> bool:
        """`take` slots for `extent` tokens of a request whose first forward here has its first query at
        position `starts_at`. After True comes `tell_admitted`, when it has what else it takes at once."""
        cache, node = self.memory.cache, match.last_device_node
        # A lock makes evictable pages protected, so free memory is counted after it.
        cache.inc_lock_ref(node)
        rows = self._pool.alloc(1)
        if rows is None:
            cache.dec_lock_ref(node)
            return False
        row = rows[0]
        if self.window is not None:
            self.window.attach(row, starts_at, match.part("window"))
        self.lower.found(req)  # what was loaded for it has its locks now, and the rest counts as free
        prefix = len(match.device_indices)
        wanted = self.pages_of(extent - prefix) * self.page_size
        fits = self._fits(row, wanted, spare)
        if not fits and not (self.lower.makes_room() and self._fits(row, wanted, spare)):
            self._free_row(row)
            cache.dec_lock_ref(node)
            return False
        req.req_pool_idx = row
        req.prefix_indices = match.device_indices
        extended = alloc_for_extend(self.memory, req, extent)
        assert extended, "free and evictable tokens were counted, yet cannot be allocated"
        if self.states is not None:
            pair = self.states.alloc(STATE_PAIR)
            assert pair is not None, "state slots were counted, yet cannot be allocated"
            live = state_slot(match.part("state"))
            req.state_hold = StateHold(pair.tolist(), live, prefix, branching_len=match.branching_len)
        req.last_node = node
        req.cache_protected_len = req.kv_committed_len = req.scheduled_len = prefix
        return True

    def _fits(self, row: int, wanted: int, spare: Capacity) -> bool:
        if self.free_tokens() < wanted + spare.tokens:
            return False
        window, states = self.window, self.states
        if window is not None and window.available_pages() + window.held_pages(row) < spare.window_pages:
            return False
        return states is None or states.available_pages() >= STATE_PAIR

    def _free_row(self, row: int) -> None:
        """Free a row that holds nothing but locks on window pages."""
        if self.window is not None:
            own = self.window.release(row)
            assert not len(own), "the row has pages of its own already"
        self._pool.free(row)

    def extend_window(self, req: Req, end: int) -> bool:
        """Allocate window pages for a chunk that ends at `end`. False, and none, if there are too few."""
        if self.window is None or self.window.extend(row_of(req), end):
            return True
        return self.lower.makes_room() and self.window.extend(row_of(req), end)

    def grow(self, running: RunningBatch) -> bool:
        """Allocate the next page of every request at a page border. False if there are too few pages."""
        indices = running.at_page_border()
        if not len(indices):
            return True
        if not self._grow_window(running, indices):
            return False
        lens = running.lens[indices]
        pages = alloc_for_decode(self.memory, running.rows[indices], lens)
        if pages is None:
            return False
        running.page_table[indices, lens // self.page_size] = pages
        for index in indices.tolist():
            running.reqs[index].kv_allocated_len += self.page_size
        return True

    def _grow_window(self, running: RunningBatch, indices: npt.NDArray[np.intp]) -> bool:
        """The same for the window group. A second call for the same lengths allocates nothing, so pages stay
        allocated when the primary group has too few."""
        window = self.window
        if window is None:
            return True
        rows, lens = running.rows[indices], running.lens[indices]
        # A launched forward has its first query where the committed context ends. The window slides no
        # further than to the first page that this query sees.
        committed = np.array([running.reqs[index].kv_committed_len for index in indices.tolist()])
        seen_from = (committed - window.window + 1) // self.page_size
        lengths = np.minimum(lens, (seen_from + window.tail) * self.page_size)
        self.memory.free({"window": window.slide_rows(rows, lengths)})
        return window.extend_rows(rows, lens + 1)

    # -- caching and giving back -------------------------------------------------------------------

    def cache_prefix(self, req: Req, last_launch: int, chunked: bool = False) -> None:
        """Put the request's committed pages into the tree and lock them there; slide the window.

        Duplicates of pages that another request cached first are freed. A forward that has been launched may
        read them (it was built with the old page table), and so may the request's reader: then they are freed
        after its result, and when they have been sent.
        """
        if req.in_flight == 0 and not _is_read(req):
            self.memory.cache.cache_unfinished_req(req, chunked)
        else:
            self.memory.free_group_begin()
            self.memory.cache.cache_unfinished_req(req, chunked)
            launch = last_launch if req.in_flight else 0
            self.deferred.hold(self.memory.free_group_take(), launch, req.reader)
        if self.window is not None:  # no launched forward starts before the committed length
            self.memory.free({"window": self.window.slide(row_of(req), req.kv_committed_len)})

    def cut_points(self, req: Req, total: int) -> tuple[int, ...]:
        """Lengths below `total` at which the cache wants a forward of this request to end."""
        return self.memory.cache.cut_points(req, total)

    def slots(self, req: Req, total: int) -> npt.NDArray[np.int32]:
        """Slots of the request's first `total` tokens, a view."""
        return self._req_to_token[req.req_pool_idx, :total]

    def release(self, req: Req, is_insert: bool) -> None:
        """Give everything back: pages into the tree or free, locks and row free. No forward is in flight.

        What is being sent may have other content before it is read, so all that was sent is worthless then.
        """
        assert req.in_flight == 0, f"{req} is in a launched forward"
        if req.reader is not None and not req.reader.idle:
            req.reader.abort("the request's memory was taken away while it was sent")
        release_kv_cache(self.memory, req, is_insert=is_insert)
        req.forget_memory()

    def private_pages(self, req: Req) -> GroupPages:
        """Pages and slots that this request holds outside the tree."""
        row = req.req_pool_idx
        if row is None:
            return {}
        slots = self._req_to_token[row, req.cache_protected_len : req.kv_allocated_len]
        pages: GroupPages = {self._primary: np.unique(slots.astype(np.int64) // self.page_size)}
        if self.window is not None:
            pages["window"] = self.window.private_pages(row)
        if req.state_hold is not None:
            pages["state"] = np.array(req.state_hold.private)
        return pages


def _is_read(req: Req) -> bool:
    """Whether pages of the request are being sent."""
    return req.reader is not None and not req.reader.idle


def _offload_stride(memory: Memory) -> int:
    """Tokens of an answer that go to the lower tiers at a time while it is generated: whole pages, and with
    states from one checkpoint to another. 0: none do. With write_back nothing goes down before its eviction.
    """
    tiers = memory.config.tiers
    if memory.tiers is None or tiers.write_policy == "write_back":
        return 0
    unit = memory.page_size if memory.states is None else memory.config.mamba_track_interval
    return -(-tiers.decode_offload_tokens // unit) * unit


def match_len(req: Req) -> int:
    """How much of the request's prefill may be cached. The last token must be computed to sample the next,
    unless its successor is known."""
    if req.needs_all:
        return 0
    return req.prefill_len if req.is_kv_only else req.prefill_len - 1


def tell_admitted(pages: Pages, req: Req) -> None:
    """Tell lower tiers and sharing what the request has found. What is copied to the host then cannot be
    evicted until it is there."""
    node, promotion = req.last_node, pages.memory.promotion
    pages.lower.admitted(req, node)
    if promotion is not None:
        promotion.admitted(req.tenant_key, node, req.prefill_len - req.cache_protected_len)


def row_of(req: Req) -> int:
    """The request's row; it must have one."""
    assert req.req_pool_idx is not None, f"{req} has no row"
    return req.req_pool_idx
