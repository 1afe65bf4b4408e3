"""Allocators: which pages of a group are free.

A slot is `page * page_size + offset`. All calls return None when there are too few pages, and then take none.
Pages are allocated whole: the slots behind a sequence's last token are the sequence's own.

The free list is a ring: alloc takes from its head and free appends to its tail, both in the size of the call.
(Slicing and concatenating an array, the obvious form, copies every free page on each free: 8 MB at 1M pages.)
With `need_sort`, freed pages wait in `release_pages` until an alloc runs short, then all are sorted together:
pages then come in long runs, which transfers coalesce.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]

NO_PAGES: Pages = np.empty(0, np.int32)
NO_SLOTS: Slots = np.empty(0, np.int64)


class BaseTokenToKVPoolAllocator(ABC):
    """Free pages 1..num_pages, and everything that does not depend on how tokens lie in pages."""

    def __init__(self, num_pages: int, page_size: int, need_sort: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.need_sort = need_sort
        self._ring = np.empty(num_pages, np.int32)
        # By page, 0 while it is allocated: see `_mark_freed`. Page 0 counts as freed, because it never is.
        self._freed = np.ones(num_pages + 1, np.int32)
        self._places = np.arange(1, num_pages + 1, dtype=np.int32)
        self._group: list[Pages] | None = None
        self.evicted = 0  # pages, since the start
        self.clear()

    def clear(self) -> None:
        """Every page is free again, in order."""
        self._ring[:] = self._places
        self._head, self._count = 0, self.num_pages
        self._released: list[Pages] = []
        self._released_count = 0
        self._freed[:] = 1
        self._group = None

    @property
    def free_pages(self) -> Pages:
        """Pages that alloc hands out next, in that order (a copy)."""
        return np.concatenate(self.free_runs())

    def free_runs(self) -> tuple[Pages, Pages]:
        """The same, as two views of the ring."""
        end = self._head + self._count
        return self._ring[self._head : end], self._ring[: max(0, end - self.num_pages)]

    @property
    def release_pages(self) -> Pages:
        """Freed pages that wait to be merged and sorted (a copy)."""
        return np.concatenate([*self._released, NO_PAGES])

    def available_pages(self) -> int:
        """Pages that can be allocated; those freed inside an open group are not."""
        return self._count + self._released_count

    def available_size(self) -> int:
        """Tokens in the pages that can be allocated."""
        return self.available_pages() * self.page_size

    def alloc_pages(self, n: int) -> Pages | None:
        """`n` page ids."""
        if n > self._count:
            if n > self.available_pages():
                return None
            self.merge_and_sort_free()
        pages: Pages = self._ring[self._head : self._head + n]
        if len(pages) < n:
            pages = np.concatenate((pages, self._ring[: n - len(pages)]))
        else:
            pages = pages.copy()
        self._head = (self._head + n) % max(1, self.num_pages)
        self._count -= n
        self._freed[pages] = 0
        return pages

    def free_page_ids(self, pages: npt.NDArray[np.integer]) -> None:
        """Give pages back, each once. Inside a free group they stay allocated until its taker frees them."""
        if self._group is not None:
            self._mark_freed(pages)
            self._group.append(pages.astype(np.int32))
        else:
            self._free_now(pages)

    def free_evicted(self, pages: npt.NDArray[np.integer]) -> None:
        """Give cached pages back, even inside a free group: no launched forward reads them."""
        self.evicted += len(pages)
        self._free_now(pages)

    def _free_now(self, pages: npt.NDArray[np.integer]) -> None:
        n = len(pages)
        if n == 0:
            return
        self._mark_freed(pages)
        if self.need_sort:
            self._released.append(pages.astype(np.int32))
            self._released_count += n
            return
        tail = (self._head + self._count) % self.num_pages
        first = min(n, self.num_pages - tail)
        self._ring[tail : tail + first] = pages[:first]
        self._ring[: n - first] = pages[first:]
        self._count += n

    def _mark_freed(self, pages: npt.NDArray[np.integer]) -> None:
        """Refuse pages that are free, or in the open group, or twice in `pages`.

        Each page is marked with its place in `pages`. A page that is there twice keeps one place only, so a
        second look finds it, without sorting.
        """
        freed, places = self._freed, self._places[: len(pages)]
        at = pages.astype(np.intp)  # once: numpy converts other indices anew at each use
        if np.count_nonzero(freed.take(at)):
            assert at.all(), "page 0 is scratch and never freed"
            raise AssertionError(f"freed twice: {at[freed[at] != 0][:8]}")
        assert len(places) == len(at), "more pages in one free than there are"
        freed[at] = places
        if freed.take(at).tobytes() != places.tobytes():
            raise AssertionError(f"freed twice, by one free: {at[freed[at] != places][:8]}")

    def merge_and_sort_free(self) -> None:
        """Bring back the waiting pages and put all free pages in ascending order."""
        free = np.sort(np.concatenate((self.free_pages, self.release_pages)))
        self._head, self._count = 0, len(free)
        self._ring[: len(free)] = free
        self._released, self._released_count = [], 0

    def free_group_begin(self) -> None:
        """Until `free_group_take`, freed pages stay allocated."""
        assert self._group is None, "free groups do not nest"
        self._group = []

    def free_group_take(self) -> Pages:
        """End the group without freeing: its pages are the caller's, to free when nothing reads them."""
        pages = self.pending_pages()
        self._freed[pages] = 0
        self._group = None
        return pages

    def pending_pages(self) -> Pages:
        """Pages freed in the open group: still allocated, and no longer anybody's."""
        return np.concatenate([*(self._group or []), NO_PAGES])

    @abstractmethod
    def alloc(self, n: int) -> Slots | None:
        """`n` token slots, a whole number of pages."""

    @abstractmethod
    def free(self, slots: npt.NDArray[np.integer]) -> None:
        """Give back the pages of consecutive tokens: `slots` in the tokens' order, from a page border on."""


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Page size 1: a slot is a page."""

    def __init__(self, num_pages: int, need_sort: bool = False) -> None:
        super().__init__(num_pages, 1, need_sort)

    def alloc(self, n: int) -> Slots | None:
        """`n` slots."""
        pages = self.alloc_pages(n)
        return None if pages is None else pages.astype(np.int64)

    def free(self, slots: npt.NDArray[np.integer]) -> None:
        """Give slots back, each once."""
        self.free_page_ids(slots)


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of `page_size` tokens; a sequence's last page may be partly filled."""

    def alloc(self, n: int) -> Slots | None:
        """`n` slots, `n` a multiple of the page size."""
        assert n % self.page_size == 0, f"{n} tokens are not whole pages of {self.page_size}"
        pages = self.alloc_pages(n // self.page_size)
        return None if pages is None else expand_pages(pages, self.page_size)

    def free(self, slots: npt.NDArray[np.integer]) -> None:
        """Give back the pages of consecutive tokens; the last one may be partly filled."""
        self.free_page_ids(slots[:: self.page_size] // self.page_size)


def make_allocator(num_pages: int, page_size: int, need_sort: bool = False) -> BaseTokenToKVPoolAllocator:
    """The allocator for a page size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, need_sort)
    return PagedTokenToKVPoolAllocator(num_pages, page_size, need_sort)


def expand_pages(pages: npt.NDArray[np.integer], page_size: int) -> Slots:
    """All slots of `pages`, in order."""
    slots = pages.astype(np.int64)
    if page_size == 1:
        return slots
    return (slots[:, None] * page_size + np.arange(page_size)).reshape(-1)
