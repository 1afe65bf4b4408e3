"""SWATokenToKVPoolAllocator: which window pages every running request holds, page by page.

A windowed layer's query at position p sees positions p - window + 1 .. p. So a sequence needs only its pages
from `needed_from(length)` on, and the table says where they are, at page granularity:

    logical page   0 ....... first ........ private_from ........ end
                   given up    the tree's,    the request's own     not there yet
                   (id 0)      locked page by page

Pages are a group's own: they have nothing to do with the page ids of the group that decides reuse. Locks on
the tree's pages are counted by page id, so a decoding request lets go of one page at a time, and splitting a
node concerns no lock. With prefix caching off nothing is the tree's and all pages are the request's own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages

NO_PAGES: Pages = np.empty(0, np.int32)

Ints = npt.NDArray[np.integer]


class WindowLocks:
    """How many rows lock each window page of the tree."""

    def __init__(self, num_pages: int) -> None:
        self.counts: npt.NDArray[np.int32] = np.zeros(num_pages + 1, np.int32)
        self.locked_pages = 0  # pages with at least one lock
        self.on_unlocked: Callable[[Pages], None] = lambda _: None  # pages that nobody locks any more

    def lock(self, pages: Pages) -> None:
        """Lock each of `pages` once; they are distinct."""
        assert pages.all(), "page 0 is nobody's to lock"
        self.locked_pages += int(np.count_nonzero(self.counts[pages] == 0))
        self.counts[pages] += 1

    def unlock(self, pages: Pages) -> None:
        """Undo one lock of each of `pages`; a page that several rows let go of may occur as often."""
        if not len(pages):
            return
        np.subtract.at(self.counts, pages, 1)
        left = self.counts[pages]
        assert left.min() >= 0, "a window page is unlocked more often than locked"
        free = np.unique(pages[left == 0])
        self.locked_pages -= len(free)
        if len(free):
            self.on_unlocked(free)


class SWATokenToKVPoolAllocator:
    """Window pages by row. `table[row, logical page]` is a page id of the window group, 0 where none is held.

    One thread. Calls that take pages give all or nothing; calls that give pages up return the request's own,
    for the caller to free (at once, or when no launched forward reads them).
    """

    def __init__(
        self, allocator: BaseTokenToKVPoolAllocator, window: int, rows: int, max_context_len: int
    ) -> None:
        """Rows 1..rows of at most `max_context_len` tokens, over the page ids of `allocator`."""
        self.allocator = allocator
        self.window = window
        self.page_size = allocator.page_size
        # Pages before a page border that a query there sees; one even if it sees none, so that there is
        # always a page to say that this length was kept.
        self.tail = max(1, -(-(window - 1) // self.page_size))
        self.locks = WindowLocks(allocator.num_pages)
        width = -(-max_context_len // self.page_size)
        self.table: npt.NDArray[np.int32] = np.zeros((rows + 1, width), np.int32)
        self.first: npt.NDArray[np.int64] = np.zeros(rows + 1, np.int64)
        self.private_from: npt.NDArray[np.int64] = np.zeros(rows + 1, np.int64)
        self.end: npt.NDArray[np.int64] = np.zeros(rows + 1, np.int64)
        self.evict: Callable[[int], int] = lambda _: 0  # the cache's evict_window
        self.evictable_pages: Callable[[], int] = lambda: 0  # the cache's

    # -- numbers -----------------------------------------------------------------------------------

    def needed_from(self, length: int) -> int:
        """The first logical page that a sequence of `length` tokens still needs.

        It is the first that a query at the last page border sees, which may be one page before what a query
        at `length` sees: so what ends here can be cached and continued from.
        """
        return max(0, length // self.page_size - self.tail)

    def pages_of(self, length: int) -> int:
        """Pages that `length` tokens span."""
        return -(-length // self.page_size)

    def available_pages(self) -> int:
        """Pages that can be had: free, or cached and unlocked."""
        return self.allocator.available_pages() + self.evictable_pages()

    def held_pages(self, row: int) -> int:
        """Pages that a row holds or locks."""
        return int(self.end[row] - self.first[row])

    def private_pages(self, row: int) -> Pages:
        """The request's own pages of a row."""
        pages: Pages = self.table[row, self.private_from[row] : self.end[row]].copy()
        return pages

    # -- taking ------------------------------------------------------------------------------------

    def attach(self, row: int, length: int, window_pages: Pages) -> None:
        """A free row begins with a match of `length` tokens (whole pages), whose node is locked.

        `window_pages` has a page id for every matched logical page, 0 where the tree holds none. Those that
        are needed are entered and locked, up to the first that is missing.
        """
        assert not self.end[row], f"row {row} holds window pages already"
        start = self.needed_from(length)
        wanted = window_pages[start : length // self.page_size]
        missing = np.flatnonzero(wanted == 0)
        mine = wanted[: missing[0]] if len(missing) else wanted
        self.table[row, start : start + len(mine)] = mine
        self.first[row] = start
        self.private_from[row] = self.end[row] = start + len(mine)
        self.locks.lock(mine)

    def extend(self, row: int, length: int) -> bool:
        """Own pages for all logical pages up to `length` tokens. False, and nothing taken, when short."""
        start, stop = int(self.end[row]), self.pages_of(length)
        if stop <= start:
            return True
        pages = self._alloc(stop - start)
        if pages is None:
            return False
        self.table[row, start:stop] = pages
        self.end[row] = stop
        return True

    def extend_lanes(self, rows: Ints, lengths: Ints) -> bool:
        """`extend` of several distinct rows by at most one page each. All or nothing."""
        stops = -(-lengths // self.page_size)
        short = stops > self.end[rows]
        wanting, ends = rows[short], stops[short]
        assert (ends == self.end[wanting] + 1).all(), "a lane grows by one page at a time"
        pages = self._alloc(len(wanting))
        if pages is None:
            return False
        self.table[wanting, ends - 1] = pages
        self.end[wanting] = ends
        return True

    def _alloc(self, n: int) -> Pages | None:
        short = n - self.allocator.available_pages()
        if short > 0:
            self.evict(short)
        return self.allocator.alloc_pages(n)

    # -- giving up ---------------------------------------------------------------------------------

    def slide(self, row: int, length: int) -> Pages:
        """The row's next query is at position `length`: give up what is needed no more."""
        return self._give_up(row, min(self.needed_from(length), int(self.end[row])))

    def slide_lanes(self, rows: Ints, lengths: Ints) -> Pages:
        """`slide` of several distinct rows, a page of each at a time: all there is at a page border."""
        starts = np.minimum(np.maximum(0, lengths // self.page_size - self.tail), self.end[rows])
        own = [NO_PAGES]
        while (moving := starts > self.first[rows]).any():
            rows, starts = rows[moving], starts[moving]
            first = self.first[rows]
            pages = self.table[rows, first]
            shared = first < self.private_from[rows]
            self.table[rows, first] = 0
            self.first[rows] = first + 1
            self.private_from[rows] = np.maximum(self.private_from[rows], first + 1)
            self.locks.unlock(pages[shared])
            own.append(pages[~shared])
        return np.concatenate(own)

    def release(self, row: int) -> Pages:
        """The row holds nothing any more."""
        own = self._give_up(row, int(self.end[row]))
        self.first[row] = self.private_from[row] = self.end[row] = 0
        return own

    def _give_up(self, row: int, start: int) -> Pages:
        """Everything before logical page `start`."""
        first, border = int(self.first[row]), int(self.private_from[row])
        if start <= first:
            return NO_PAGES
        shared = self.table[row, first : min(start, border)].copy()
        own = self.table[row, max(first, border) : start].copy()
        self.table[row, first:start] = 0
        self.first[row] = start
        self.private_from[row] = max(border, start)
        self.locks.unlock(shared)
        return own

    # -- caching -----------------------------------------------------------------------------------

    def offered(self, row: int, pages: int) -> Pages:
        """What a row can give the tree of its first `pages` logical pages: its own, 0 for all others."""
        offer = np.zeros(pages, np.int32)
        start, stop = int(self.private_from[row]), min(int(self.end[row]), pages)
        offer[start:stop] = self.table[row, start:stop]
        return offer

    def adopt(self, row: int, window_pages: Pages) -> Pages:
        """The tree holds `window_pages` now, and the path is locked: the row locks those instead of its own.

        Returns the row's own pages of which the tree had others already.
        """
        start, stop = int(self.private_from[row]), len(window_pages)
        if stop <= start:
            return NO_PAGES
        assert stop <= self.end[row], "the tree cannot have pages that the row lacks"
        mine, theirs = self.table[row, start:stop].copy(), window_pages[start:stop]
        self.table[row, start:stop] = theirs
        self.private_from[row] = stop
        self.locks.lock(theirs)
        duplicates: Pages = mine[mine != theirs]
        return duplicates
