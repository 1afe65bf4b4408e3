"""SWATokenToKVPoolAllocator: which window pages every running request holds, page by page.

A windowed layer's query at position p sees positions p - window + 1 .. p. So a sequence needs only its pages
from `needed_from(length)` on, and the table says where they are, at page granularity:

    logical page   0 ....... first ........ private_from ........ end
                   given up    the tree's,    the request's own     not there yet
                   (id 0)      locked page by page

The page ids have nothing to do with those of the primary group. Locks on the tree's pages are counted by page
id (WindowLocks). With prefix caching off nothing is the tree's and all pages are the request's own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.allocator import NO_PAGES, Pages
from kvcache.group_allocator import GroupAllocator
from kvcache.window_locks import WindowLocks

Ints = npt.NDArray[np.integer]


def window_tail(window: int, page_size: int) -> int:
    """How many pages before a page border a query there sees. At least one, even if the query sees none: so
    there is always a page that says that this length was kept."""
    return max(1, -(-(window - 1) // page_size))


class SWATokenToKVPoolAllocator:
    """Window pages by row. `table[row, logical page]` is a page id of the window group, 0 where none is held.

    One thread. Calls that allocate pages allocate all or none. Calls that give pages up return the request's
    own, which the caller frees (at once, or when no launched forward reads them).
    """

    def __init__(
        self, pages: GroupAllocator, locks: WindowLocks, window: int, rows: int, max_context_len: int
    ) -> None:
        """Rows 1..rows of at most `max_context_len` tokens; a query sees `window` tokens, itself included."""
        self.allocator = pages.allocator
        self.locks = locks
        self.window = window
        self.page_size = pages.allocator.page_size
        self.tail = window_tail(window, self.page_size)
        self._pages = pages
        width = -(-max_context_len // self.page_size)
        self.table: npt.NDArray[np.int32] = np.zeros((rows + 1, width), np.int32)
        self.first: npt.NDArray[np.int64] = np.zeros(rows + 1, np.int64)
        self.private_from: npt.NDArray[np.int64] = np.zeros(rows + 1, np.int64)
        self.end: npt.NDArray[np.int64] = np.zeros(rows + 1, np.int64)

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
        """Pages that can be allocated: free ones, and cached ones without a lock."""
        return self._pages.available_pages()

    def alloc(self, n: int) -> Pages | None:
        """`n` pages that are no row's, all or none."""
        return self._pages.alloc(n)

    def held_pages(self, row: int) -> int:
        """Pages that a row holds or locks."""
        return int(self.end[row] - self.first[row])

    def private_pages(self, row: int) -> Pages:
        """The request's own pages of a row."""
        pages: Pages = self.table[row, self.private_from[row] : self.end[row]].copy()
        return pages

    # -- taking ------------------------------------------------------------------------------------

    def attach(self, row: int, length: int, window_pages: Pages) -> None:
        """Begin a free row with a match of `length` tokens (whole pages), whose node is locked.

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
        """Allocate pages for all logical pages up to `length` tokens. False, and none, if there are too
        few."""
        start, stop = int(self.end[row]), self.pages_of(length)
        if stop <= start:
            return True
        pages = self._pages.alloc(stop - start)
        if pages is None:
            return False
        self.table[row, start:stop] = pages
        self.end[row] = stop
        return True

    def extend_rows(self, rows: Ints, lengths: Ints) -> bool:
        """`extend` several distinct rows by at most one page each. All or nothing."""
        stops = -(-lengths // self.page_size)
        short = stops > self.end[rows]
        wanting, ends = rows[short], stops[short]
        assert (ends == self.end[wanting] + 1).all(), "a row grows by one page at a time"
        pages = self._pages.alloc(len(wanting))
        if pages is None:
            return False
        self.table[wanting, ends - 1] = pages
        self.end[wanting] = ends
        return True

    # -- giving up ---------------------------------------------------------------------------------

    def slide(self, row: int, length: int) -> Pages:
        """The row's next query is at position `length`: give up the pages that it does not see."""
        return self._give_up(row, min(self.needed_from(length), int(self.end[row])))

    def slide_rows(self, rows: Ints, lengths: Ints) -> Pages:
        """`slide` several distinct rows. Each round gives up a page of each: at a page border one is
        enough."""
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

    def cut(self, row: int, length: int) -> Pages:
        """Give up the pages after the first `length` tokens, which are the row's own."""
        stop, end = self.pages_of(length), int(self.end[row])
        if stop >= end:
            return NO_PAGES
        assert stop >= self.private_from[row], "a page of the tree is cut off"
        own: Pages = self.table[row, stop:end].copy()
        self.table[row, stop:end] = 0
        self.end[row] = stop
        return own

    def release(self, row: int) -> Pages:
        """Give up all pages of a row."""
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
        """The row's own pages among its first `pages` logical pages, 0 for the others: its offer to the
        tree."""
        offer = np.zeros(pages, np.int32)
        start, stop = int(self.private_from[row]), min(int(self.end[row]), pages)
        offer[start:stop] = self.table[row, start:stop]
        return offer

    def adopt(self, row: int, window_pages: Pages) -> Pages:
        """The tree now holds `window_pages`, on a locked path: the row locks them and uses them instead of
        its own.

        Returns the row's own pages for which the tree had others already.
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
