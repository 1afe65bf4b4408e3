"""Allocators: which pages are free, and which slots a batch's new tokens get.

A slot is `page * page_size + offset`. All calls return None when there are too few pages, and then take none.

The free list is a ring: alloc takes from its head and free appends to its tail, both in the size of the call.
(Slicing and concatenating an array, the obvious form, copies every free page on each free: 8 MB at 1M pages.)
With `need_sort`, freed pages wait in `release_pages` until an alloc runs short, then all are sorted together:
pages then come in long runs, which transfers coalesce.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer]


class AllocatorState(NamedTuple):
    """What `backup_state` remembers."""

    free_pages: Pages
    release_pages: Pages


class BaseTokenToKVPoolAllocator(ABC):
    """Free pages 1..num_pages, and everything that does not depend on how tokens lie in pages."""

    def __init__(self, num_pages: int, page_size: int, need_sort: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.need_sort = need_sort
        self._ring = np.empty(num_pages, np.int32)
        self._is_free = np.ones(num_pages + 1, bool)  # page 0 counts as free: it is never freed
        self._group: list[Pages] | None = None
        self.clear()

    def clear(self) -> None:
        """Every page is free again, in order."""
        self._ring[:] = np.arange(1, self.num_pages + 1, dtype=np.int32)
        self._head, self._count = 0, self.num_pages
        self._released: list[Pages] = []
        self._released_count = 0
        self._is_free[:] = True
        self._group = None

    @property
    def free_pages(self) -> Pages:
        """Pages that alloc hands out next, in that order (a copy)."""
        return self._ring.take(np.arange(self._head, self._head + self._count), mode="wrap")

    @property
    def release_pages(self) -> Pages:
        """Freed pages that wait to be merged and sorted (a copy)."""
        return np.concatenate([*self._released, np.empty(0, np.int32)])

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
        self._is_free[pages] = False
        return pages

    def free_page_ids(self, pages: npt.NDArray[np.integer]) -> None:
        """Give pages back, each once. Inside a free group they stay taken until it ends."""
        if self._group is not None:
            self._group.append(pages.astype(np.int32))
        else:
            self.free_now(pages)

    def free_now(self, pages: npt.NDArray[np.integer]) -> None:
        """Give pages back even inside a free group: evicted ones, which nothing that was launched reads."""
        n = len(pages)
        if n == 0:
            return
        if np.count_nonzero(self._is_free[pages]):
            assert pages.all(), "page 0 is scratch and never freed"
            raise AssertionError(f"freed twice: {pages[self._is_free[pages]][:8]}")
        self._is_free[pages] = True
        if self.need_sort:
            self._released.append(pages.astype(np.int32))
            self._released_count += n
            return
        assert self._count + n <= self.num_pages, "the same page twice in one free"
        tail = (self._head + self._count) % self.num_pages
        first = min(n, self.num_pages - tail)
        self._ring[tail : tail + first] = pages[:first]
        self._ring[: n - first] = pages[first:]
        self._count += n

    def merge_and_sort_free(self) -> None:
        """Bring back the waiting pages and put all free pages in ascending order."""
        self._set_free(np.sort(np.concatenate((self.free_pages, self.release_pages))), [])

    def free_group_begin(self) -> None:
        """Until `free_group_end`, freed pages stay taken: one batch of frees, applied once."""
        assert self._group is None, "free groups do not nest"
        self._group = []

    def free_group_end(self) -> None:
        """Free what was freed since `free_group_begin`."""
        assert self._group is not None, "no free group is open"
        group, self._group = self._group, None
        if group:
            self.free_page_ids(np.concatenate(group))

    def free_group_take(self) -> Pages:
        """End the group without freeing: its pages are the caller's, to free when nothing reads them."""
        pages = self.pending_pages()
        self._group = None
        return pages

    def pending_pages(self) -> Pages:
        """Pages freed in the open group: taken still, owned by nobody."""
        return np.concatenate([*(self._group or []), np.empty(0, np.int32)])

    def backup_state(self) -> AllocatorState:
        """A copy of what is free, for a trial allocation."""
        return AllocatorState(self.free_pages, self.release_pages)

    def restore_state(self, state: AllocatorState) -> None:
        """Free exactly what was free at `backup_state`."""
        self._set_free(state.free_pages, [state.release_pages])

    def _set_free(self, free: Pages, released: list[Pages]) -> None:
        self._head, self._count = 0, len(free)
        self._ring[: len(free)] = free
        self._released = released
        self._released_count = sum(map(len, released))
        self._is_free[1:] = False
        for pages in (free, *released):
            self._is_free[pages] = True

    @abstractmethod
    def alloc(self, n: int) -> Slots | None:
        """`n` token slots, a whole number of pages."""

    @abstractmethod
    def free(self, slots: npt.NDArray[np.integer]) -> None:
        """Give back every page that one of `slots` lies in."""

    @abstractmethod
    def alloc_extend(
        self, prefix_lens: Lengths, seq_lens: Lengths, last_loc: Lengths, extend_num_tokens: int
    ) -> Slots | None:
        """Slots for positions `[prefix_lens[i], seq_lens[i])` of each sequence, concatenated.

        `last_loc[i]` is the slot of position `prefix_lens[i] - 1`, or -1 when the prefix is empty; a partial
        last page is filled before new pages are taken. `extend_num_tokens` is the sum of the new tokens.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: Lengths, last_loc: Lengths) -> Slots | None:
        """One slot per sequence for position `seq_lens[i] - 1`; `last_loc[i]` is that of the one before."""


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Page size 1: a slot is a page, and nothing is ever partial."""

    def __init__(self, num_pages: int, need_sort: bool = False) -> None:
        super().__init__(num_pages, 1, need_sort)

    def alloc(self, n: int) -> Slots | None:
        """`n` slots."""
        pages = self.alloc_pages(n)
        return None if pages is None else pages.astype(np.int64)

    def free(self, slots: npt.NDArray[np.integer]) -> None:
        """Give slots back, each once."""
        self.free_page_ids(slots)

    def alloc_extend(
        self, prefix_lens: Lengths, seq_lens: Lengths, last_loc: Lengths, extend_num_tokens: int
    ) -> Slots | None:
        """As the base says; only the sum matters here."""
        del last_loc  # no page is ever partial
        assert int(seq_lens.sum() - prefix_lens.sum()) == extend_num_tokens, "lengths do not add up"
        return self.alloc(extend_num_tokens)

    def alloc_decode(self, seq_lens: Lengths, last_loc: Lengths) -> Slots | None:
        """One slot per sequence."""
        del last_loc  # no page is ever partial
        return self.alloc(len(seq_lens))


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of `page_size` tokens; a sequence's last page may be partly filled."""

    def alloc(self, n: int) -> Slots | None:
        """`n` slots, `n` a multiple of the page size."""
        assert n % self.page_size == 0, f"{n} tokens are not whole pages of {self.page_size}"
        pages = self.alloc_pages(n // self.page_size)
        return None if pages is None else expand_pages(pages, self.page_size)

    def free(self, slots: npt.NDArray[np.integer]) -> None:
        """Give back every page that one of `slots` lies in."""
        self.free_page_ids(np.unique(slots // self.page_size))

    def alloc_extend(
        self, prefix_lens: Lengths, seq_lens: Lengths, last_loc: Lengths, extend_num_tokens: int
    ) -> Slots | None:
        """As the base says. New pages per sequence: ceil(seq / page) - ceil(prefix / page)."""
        size = self.page_size
        new_tokens = seq_lens - prefix_lens
        assert int(new_tokens.sum()) == extend_num_tokens, "lengths do not add up"
        assert bool(((last_loc + 1) % size == prefix_lens % size).all()), "last_loc is not where prefixes end"
        old_pages = -(-prefix_lens // size)
        new_pages = -(-seq_lens // size) - old_pages
        pages = self.alloc_pages(int(new_pages.sum()))
        if pages is None:
            return None
        # For every new token: its position, and its page counted over all pages of this call. A position
        # before `border` still lies in the partial page, right behind last_loc.
        starts = np.cumsum(new_tokens) - new_tokens
        index = np.arange(extend_num_tokens) - np.repeat(starts, new_tokens)
        position = index + np.repeat(prefix_lens, new_tokens)
        first_page = np.cumsum(new_pages) - new_pages - old_pages
        page_index = position // size + np.repeat(first_page, new_tokens)
        in_partial = position < np.repeat(old_pages * size, new_tokens)
        slots: Slots = np.repeat(last_loc + 1, new_tokens).astype(np.int64) + index
        fresh = ~in_partial
        slots[fresh] = pages[page_index[fresh]].astype(np.int64) * size + position[fresh] % size
        return slots

    def alloc_decode(self, seq_lens: Lengths, last_loc: Lengths) -> Slots | None:
        """As the base says; a new page only for a sequence whose last page is full."""
        starts_page = (seq_lens - 1) % self.page_size == 0
        pages = self.alloc_pages(int(np.count_nonzero(starts_page)))
        if pages is None:
            return None
        slots = np.asarray(last_loc).astype(np.int64) + 1
        slots[starts_page] = pages.astype(np.int64) * self.page_size
        return slots


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


class PageLease:
    """Pages that are freed when the block ends, unless `keep` handed them on: an error path cannot leak them.

    `pages` is None when there were too few.
    """

    def __init__(self, allocator: BaseTokenToKVPoolAllocator, n: int) -> None:
        self._allocator = allocator
        self.pages = allocator.alloc_pages(n)

    def keep(self) -> Pages:
        """The pages now belong to the caller."""
        assert self.pages is not None, "there is nothing to keep"
        pages, self.pages = self.pages, None
        return pages

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pages is not None:
            self._allocator.free_page_ids(self.pages)
            self.pages = None
