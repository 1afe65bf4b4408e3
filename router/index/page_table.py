"""PageTable: page hash -> which workers hold it, in which tier. The index's memory, without names or sockets.

Workers are *slots* here: small integers that `global_index.py` gives out, so that a match over all workers is
one row of an array. Two tables have this interface: the one in C++ (`native/`), and `PythonPageTable`, which
tests compare it with and which takes over where nothing can be compiled.
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
    """Where a page is, cheapest first. EXPECTED: on its way (being prefilled or transferred)."""

    GPU = 0
    CPU = 1
    STORAGE = 2
    EXPECTED = 3


HELD = 0b0111  # a mask of tiers: what workers have said themselves
ALL = 0b1111


class PageTable(Protocol):
    """Safe to call from several threads; `find` never waits for `apply` longer than one batch takes."""

    def store(self, slot: int, tier: int, hashes: Hashes) -> None:
        """The worker in `slot` holds these pages in `tier`."""

    def remove(self, slot: int, tier: int, hashes: Hashes) -> None:
        """They have left that tier. Pages that were not there change nothing."""

    def clear(self, slot: int, tiers: int) -> None:
        """The worker holds nothing in the tiers of this mask (HELD, ALL)."""

    def apply(self, slot: int, payload: bytes) -> int:
        """A whole event batch of our own form, for the tiers GPU, CPU and STORAGE.

        Returns its events; -1 when it is not of that form, and then nothing has changed.
        """

    def find(self, hashes: Hashes, found: npt.NDArray[np.int32]) -> None:
        """Match a prompt against every worker. `found` is int32 [4, slots], written whole.

        Row GPU counts the leading pages that the slot's worker holds in any tier. The other rows say how many
        of those are nowhere better than in CPU memory, in storage, or on their way.
        """

    def held(self, slot: int) -> list[int]:
        """Every page of a worker that is more than expected. Scans."""

    def __len__(self) -> int:
        """Different pages known."""

    def nbytes(self) -> int:
        """Memory of the table, as far as it knows itself."""


def make_page_table() -> PageTable:
    """The table in C++; the reference where it cannot be compiled."""
    compiled = native()
    if compiled is None:
        return PythonPageTable()
    table: PageTable = compiled.PageTable()
    return table


class PythonPageTable:
    """The reference: a dict per page of slot -> mask of tiers."""

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, int]] = {}
        self._lock = threading.Lock()

    def store(self, slot: int, tier: int, hashes: Hashes) -> None:
        """See PageTable."""
        with self._lock:
            for page in hashes.tolist():
                holders = self._pages.setdefault(page, {})
                holders[slot] = holders.get(slot, 0) | 1 << tier

    def remove(self, slot: int, tier: int, hashes: Hashes) -> None:
        """See PageTable."""
        with self._lock:
            for page in hashes.tolist():
                self._take(page, slot, 1 << tier)

    def clear(self, slot: int, tiers: int) -> None:
        """See PageTable."""
        with self._lock:
            for page in [page for page, holders in self._pages.items() if slot in holders]:
                self._take(page, slot, tiers)

    def apply(self, slot: int, payload: bytes) -> int:  # noqa: ARG002  the caller reads it event by event
        """See PageTable."""
        return -1

    def find(self, hashes: Hashes, found: npt.NDArray[np.int32]) -> None:
        """See PageTable."""
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

    def held(self, slot: int) -> list[int]:
        """See PageTable."""
        with self._lock:
            return [page for page, holders in self._pages.items() if holders.get(slot, 0) & HELD]

    def __len__(self) -> int:
        return len(self._pages)

    def nbytes(self) -> int:
        """See PageTable. A guess from the sizes of dicts and ints."""
        return len(self._pages) * 350

    def _take(self, page: int, slot: int, tiers: int) -> None:
        holders = self._pages.get(page)
        if holders is None or slot not in holders:
            return
        holders[slot] &= ~tiers
        if not holders[slot]:
            del holders[slot]
            if not holders:
                del self._pages[page]
