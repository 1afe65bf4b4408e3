"""Reservations: rows and pages of requests whose KV comes from another worker."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.memory import GroupPages
from scheduler.pages import Capacity, Pages, row_of, tell_admitted
from scheduler.req import Req, ReservedPages


class Reservations:
    """Taken by `reserve`; filled by a transfer, then `settle`; or ended by `split`."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._memory = pages.memory
        self._page_size = pages.page_size
        self._window = pages.window
        self._primary = pages.memory.specs[0].name
        self._req_to_token = pages.memory.req_to_token_pool.req_to_token

    def reserve(self, req: Req, spare: Capacity, extent: int) -> bool:
        """`take` for a prompt that comes by transfer, with pages for `extent` tokens, not fewer than the
        prompt's. `req.reserved` has those that are not cached here, by group."""
        total = req.prefill_len
        if self._waits_for_load(req, spare, extent):
            return False
        match = self._memory.cache.match_parts(self._pages.key(req, total))
        if not self._pages.take_slots(req, match, total, spare, extent):
            return False
        first = req.cache_protected_len
        slots = self._pages.slots(req, extent)[first :: self._page_size]
        missing = slots.astype(np.int64) // self._page_size
        req.reserved = {self._primary: ReservedPages(first // self._page_size, missing)}
        if self._window is not None:
            row = row_of(req)
            assert self._window.extend(row, extent), "window pages were counted, yet cannot be allocated"
            own = self._window.private_pages(row).astype(np.int64)
            req.reserved["window"] = ReservedPages(int(self._window.private_from[row]), own)
        if (hold := req.state_hold) is not None:
            hold.live, hold.live_len = hold.private[0], total
            req.reserved["state"] = ReservedPages(0, np.array([hold.live], np.int64))
        tell_admitted(self._pages, req)
        return True

    def _waits_for_load(self, req: Req, spare: Capacity, extent: int) -> bool:
        """Whether a part of the prompt is on its way from host or storage, and need not come from
        elsewhere."""
        if self._memory.tiers is None:
            return False
        if self._pages.lower.awaits_storage(req):
            return True
        match = self._memory.cache.match_prefix(self._pages.key(req, req.prefill_len))
        return self._pages.brings_back(req, match, spare, extent)

    def filled(self, req: Req, length: int) -> dict[str, npt.NDArray[np.int64]]:
        """Of the reserved pages, in order, those that a transfer of `length` tokens fills: what a query at
        that position sees."""
        return {name: reserved.within(*self._seen(name, length)) for name, reserved in req.reserved.items()}

    def _seen(self, group: str, length: int) -> tuple[int, int]:
        """The logical pages of a group, from and to, that a sequence of `length` tokens needs."""
        if group == "state":
            return 0, 1
        first = 0 if group == self._primary or self._window is None else self._window.needed_from(length)
        return first, self._pages.pages_of(length)

    def settle(self, req: Req, length: int) -> None:
        """A transfer has filled the reservation up to `length` tokens: free what it did not need."""
        row, end = row_of(req), self._pages.pages_of(length) * self._page_size
        spare = self._req_to_token[row, end : req.kv_allocated_len : self._page_size] // self._page_size
        self._memory.free({self._primary: spare})
        req.kv_allocated_len = end
        if self._window is not None:
            own = np.concatenate([self._window.slide(row, length), self._window.cut(row, length)])
            self._memory.free({"window": own})
        if (hold := req.state_hold) is not None:
            hold.live_len = length
        req.reserved = {}

    def split(self, req: Req) -> GroupPages:
        """Give back row and locks of a reservation. Returns the pages that a peer may write to, still
        allocated."""
        pages: GroupPages = {name: reserved.pages for name, reserved in req.reserved.items()}
        row = row_of(req)
        if self._window is not None:
            self._window.release(row)
        if self._memory.states is not None and (hold := req.state_hold) is not None:
            self._memory.states.free([slot for slot in hold.private if slot != hold.live])
        self._memory.cache.dec_lock_ref(req.last_node)
        self._memory.req_to_token_pool.free(row)
        req.forget_memory()
        return pages
