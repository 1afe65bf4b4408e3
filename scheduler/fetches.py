"""Fetches: pages that are reserved for what another worker may have of a prompt.

    reserve ──the pages have landed──> commit: a whole prefix enters the tree, unlocked; the rest is free
            ──refused, late, aborted──> give_up: the pages go to the caller, for the transport's fence

The request itself has no memory meanwhile, and no place in the queue: others go on. What it has here of its
prompt is locked, so that the fetched pages have something to follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.allocator import NO_PAGES
from kvcache.base_prefix_cache import MatchResult
from kvcache.memory import GroupPages
from kvcache.radix_key import RadixKey
from kvcache.request import STATE_PAIR
from kvcache.tree_node import TreeNode
from scheduler.pages import Capacity, Pages
from scheduler.req import Req


@dataclass(slots=True, eq=False)
class FetchHold:
    """Pages that another worker may write, for the first tokens of a request's prompt.

    The primary group's are those of the logical pages `first_page` and on. A window group's are as many as a
    query sees, wherever the prefix ends; a state group's is one slot.
    """

    req: Req
    key: RadixKey  # whole pages
    have: int  # tokens from which a forward could go on here already
    first_page: int
    pages: GroupPages
    node: TreeNode | None  # the end of what is here, locked

    def filled(self, group: str, is_primary: bool, tail: int, pages: int) -> npt.NDArray[np.int64]:
        """Of a group's pages, those that a prefix of `pages` pages fills. `tail`: pages of a window."""
        count = len(self.pages[group])
        if is_primary:
            count = max(pages - self.first_page, 0)
        elif group == "window":
            count = min(tail, pages)
        return self.pages[group][:count].astype(np.int64)


class Fetches:
    """All fetches of one scheduler."""

    def __init__(self, pages: Pages) -> None:
        self._memory = pages.memory
        self._pages = pages
        self._page_size = pages.page_size
        self._primary = pages.memory.specs[0].name
        self._tail = 0 if pages.window is None else pages.window.tail
        self._holds: list[FetchHold] = []

    def __len__(self) -> int:
        return len(self._holds)

    def pages(self) -> Iterator[GroupPages]:
        """What the fetches hold, by group."""
        return (hold.pages for hold in self._holds)

    def missing(self, req: Req, tokens: int) -> int:
        """Of the first `tokens` tokens, how many would have to be computed here."""
        return tokens - self._have(self._pages.key(req, tokens))

    def reserve(self, req: Req, tokens: int, spare: Capacity) -> FetchHold | None:
        """Take pages for what is missing here of the first `tokens` tokens, whole pages. None, and nothing is
        taken, unless `spare` stays free (or evictable) besides."""
        cache, key = self._memory.cache, self._pages.key(req, tokens)
        have = self._have(key)
        match = cache.match_parts(key)
        first = len(match.device_indices) // self._page_size
        node = match.last_device_node
        cache.inc_lock_ref(node)
        wanted = tokens // self._page_size - first
        taken = self._take(wanted, spare)
        if taken is None:
            cache.dec_lock_ref(node)
            return None
        hold = FetchHold(req, key, have, first, taken, node)
        self._holds.append(hold)
        return hold

    def _take(self, wanted: int, spare: Capacity) -> GroupPages | None:
        """Pages of every group: `wanted` of the primary one."""
        primary, window, states = self._memory.primary, self._pages.window, self._pages.states
        if primary.available_pages() * self._page_size < wanted * self._page_size + spare.tokens:
            return None
        if window is not None and window.available_pages() < self._tail + spare.window_pages:
            return None
        if states is not None and states.available_pages() <= STATE_PAIR:
            return None
        taken = {self._primary: primary.alloc(wanted)}
        if window is not None:
            taken["window"] = window.alloc(self._tail)
        if states is not None:
            taken["state"] = states.alloc(1)
        granted: GroupPages = {name: pages for name, pages in taken.items() if pages is not None}
        if len(granted) < len(taken):  # what could be evicted of one group went with another's
            self._memory.free(granted)
            return None
        return granted

    def filled(self, hold: FetchHold, pages: int) -> dict[str, npt.NDArray[np.int64]]:
        """By group, those of the reserved pages that a prefix of `pages` pages fills."""
        return {name: hold.filled(name, name == self._primary, self._tail, pages) for name in hold.pages}

    def commit(self, hold: FetchHold, pages: int) -> int:
        """The first `pages` pages of the prompt are complete, and nobody writes them any more: they enter the
        tree, unlocked and marked as copies. Returns how many tokens need not be computed because of them."""
        key, filled = hold.key[: pages * self._page_size], self.filled(hold, pages)
        offers: dict[str, npt.NDArray[np.int32]] = {}
        if "window" in filled:
            offers["window"] = np.zeros(pages, np.int32)
            offers["window"][pages - len(filled["window"]) :] = filled["window"]
        if "state" in filled:
            offers["state"] = filled["state"].astype(np.int32)
        ids = filled[self._primary].astype(np.int32)
        match = self._memory.cache.insert_copy(key, ids, hold.req.priority, offers, hold.node)
        kept: GroupPages = {self._primary: self._ids(match), **match.parts}
        self._memory.free(
            {name: own[~np.isin(own, kept.get(name, NO_PAGES))] for name, own in hold.pages.items()}
        )
        self._forget(hold)
        hold.req.sources.peer = max(len(match.device_indices) - hold.have, 0)
        return hold.req.sources.peer

    def give_up(self, hold: FetchHold) -> GroupPages:
        """Nothing of the fetch is used. Returns its pages, which are still allocated: they belong in
        `memory.quarantine` until the transport's fence has passed."""
        self._forget(hold)
        return hold.pages

    def _forget(self, hold: FetchHold) -> None:
        self._memory.cache.dec_lock_ref(hold.node)
        self._holds.remove(hold)

    def _have(self, key: RadixKey) -> int:
        """Tokens from which a forward could go on here, with what would be loaded from the host."""
        match = self._memory.cache.match_prefix(key)
        return len(match.device_indices) + match.host_hit_length

    def _ids(self, match: MatchResult) -> npt.NDArray[np.int64]:
        return match.device_indices[:: self._page_size] // self._page_size
