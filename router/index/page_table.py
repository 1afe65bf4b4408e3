"""PageTable: page hash -> the workers that hold the page, and in which tiers.

A worker is a *slot* here, a small integer from global_index.py, so that a match over all workers is one row
of an array. Two tables have this interface: the one in C++ (`native/`), and PythonPageTable. Tests compare
the two, and the router uses PythonPageTable where nothing can be compiled.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from router.index.native.build import native

Hashes = npt.NDArray[np.int64]
"""Page hashes in the order of the prompt, C-contiguous."""


class Tier(IntEnum):
    """Where a page is, cheapest first. EXPECTED: it is being prefilled or transferred."""

    GPU = 0
    CPU = 1
    STORAGE = 2
    EXPECTED = 3


_PRIVATE = 0b10000  # a mark beside the tiers; it goes with the last of them
HELD = 0b0111  # a mask of the tiers that KV events report
ALL = 0b1111


class PageTable(Protocol):
    """Safe to call from several threads. `find` waits for `apply` at most as long as one batch takes."""

    def store(self, slot: int, tier: int, hashes: Hashes, is_private: bool = False) -> None:
        """The worker in `slot` holds these pages in `tier`. `is_private`: they are among its private ones."""

    def remove(self, slot: int, tier: int, hashes: Hashes) -> None:
        """They have left that tier. Pages that were not there are ignored."""

    def clear(self, slot: int, tiers: int) -> None:
        """The worker holds nothing in the tiers of this mask (HELD or ALL)."""

    def clear_told(self, slot: int, is_private: bool = False) -> None:
        """The worker holds in the tiers HELD none of the pages that it told among its private ones, or among
        its public ones."""

    def apply(self, slot: int, payload: bytes, is_private: bool = False) -> int:
        """Apply an event batch of Baton's own form, for the tiers GPU, CPU and STORAGE. Pages that leave GPU
        had come: they are not expected any more. `is_private`: the batch is about private pages.

        Returns the number of its events, or -1 for a batch of another form; then nothing has changed.
        """

    def find(self, hashes: Hashes, found: npt.NDArray[np.int32]) -> None:
        """Match a prompt against every worker, and write all of `found`, an int32 array [4, slots].

        Row GPU counts the leading pages that the slot's worker holds in any tier. Each other row counts the
        pages among them whose best tier is that one.
        """

    def held(self, slot: int, tiers: int) -> list[int]:
        """All pages of a worker in any tier of this mask. Scans the table."""

    def __len__(self) -> int:
        """The number of different pages."""

    def nbytes(self) -> int:
        """Bytes of memory that the table takes."""


def make_page_table() -> PageTable:
    """Make the table in C++, or in Python where nothing can be compiled."""
    compiled = native()
    if compiled is None:
        return PythonPageTable()
    table: PageTable = compiled.PageTable()
    return table


class PythonPageTable:
    """A dict per page from slot to a mask of tiers, and the mark of private pages."""

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, int]] = {}
        self._lock = threading.Lock()

    def store(self, slot: int, tier: int, hashes: Hashes, is_private: bool = False) -> None:
        given = 1 << tier | (_PRIVATE if is_private else 0)
        with self._lock:
            for page in hashes.tolist():
                holders = self._pages.setdefault(page, {})
                holders[slot] = holders.get(slot, 0) | given

    def remove(self, slot: int, tier: int, hashes: Hashes) -> None:
        with self._lock:
            for page in hashes.tolist():
                self._take(page, slot, 1 << tier)

    def clear(self, slot: int, tiers: int) -> None:
        with self._lock:
            for page in [page for page, holders in self._pages.items() if slot in holders]:
                self._take(page, slot, tiers)

    def clear_told(self, slot: int, is_private: bool = False) -> None:
        with self._lock:
            for page, holders in list(self._pages.items()):
                if bool(holders.get(slot, 0) & _PRIVATE) == is_private:
                    self._take(page, slot, HELD)

    def apply(self, slot: int, payload: bytes, is_private: bool = False) -> int:  # noqa: ARG002  the caller does, by event
        return -1

    def find(self, hashes: Hashes, found: npt.NDArray[np.int32]) -> None:
        with self._lock:
            self._find(hashes, found)

    def _find(self, hashes: Hashes, found: npt.NDArray[np.int32]) -> None:
        found[:] = 0
        alive: set[int] | None = None
        for page in hashes.tolist():
            holders = self._pages.get(page, {})
            alive = set(holders) if alive is None else alive & holders.keys()
            if not alive:
                return
            for slot in alive:
                found[Tier.GPU, slot] += 1
                best = (holders[slot] & -holders[slot]).bit_length() - 1
                if best != Tier.GPU:
                    found[best, slot] += 1

    def held(self, slot: int, tiers: int) -> list[int]:
        with self._lock:
            return [page for page, holders in self._pages.items() if holders.get(slot, 0) & tiers]

    def __len__(self) -> int:
        return len(self._pages)

    def nbytes(self) -> int:
        return len(self._pages) * 350  # an estimate from the sizes of dicts and ints

    def _take(self, page: int, slot: int, tiers: int) -> None:
        holders = self._pages.get(page)
        if holders is None or slot not in holders:
            return
        holders[slot] &= ~tiers
        if not holders[slot] & ALL:
            del holders[slot]
            if not holders:
                del self._pages[page]
