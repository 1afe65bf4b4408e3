"""GlobalIndex: which worker holds which pages, from the KV events that workers publish.

A page is named by its event hash, which is chained over everything before it. So a worker's match is the
number of leading hashes that it holds. A tenant's private page has a name of its own (wire/page_hash.py), so
the index needs no owners: only whether a page was told on the worker's stream of private pages, because that
stream can be cleared alone. The pages are in a PageTable (page_table.py), where a worker is a slot. A worker
keeps its slot until `drop`; then another worker may get it.

Pages that are *expected* on a worker count as held (router/placement/expected_pages.py).

Threads: the event plane's thread calls `apply`, `store`, `remove` and `clear`; both call `join` and `drop`;
the event loop calls the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.index.page_table import ALL, HELD, Hashes, PageTable, Tier, make_page_table
from wire.events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, Unread, decode_batch

_TIERS = {"GPU": Tier.GPU, "CPU": Tier.CPU, "STORAGE": Tier.STORAGE}


class Matches(NamedTuple):
    """How many leading pages of one prompt each worker holds.

    `found` is int32 [4, slots] with a row per Tier. The first row counts the pages in any tier. Each other
    row counts the pages among them whose best tier is that one.
    """

    found: npt.NDArray[np.int32]

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """Leading pages in any tier, by slot."""
        return self.found[Tier.GPU, :]

    @property
    def host(self) -> npt.NDArray[np.int32]:
        """The part whose best tier is CPU memory."""
        return self.found[Tier.CPU, :]

    @property
    def storage(self) -> npt.NDArray[np.int32]:
        """The part whose best tier is storage."""
        return self.found[Tier.STORAGE, :]

    @property
    def expected(self) -> npt.NDArray[np.int32]:
        """The part that is expected only."""
        return self.found[Tier.EXPECTED, :]


class GlobalIndex:
    """The pages of all workers, by worker id."""

    def __init__(self, table: PageTable | None = None) -> None:
        self._table: PageTable = table if table is not None else make_page_table()
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []
        self._membership = threading.Lock()  # both threads may find the same free slot
        self.version = 0  # grows with each `join` of a new worker and each `drop`

    def __len__(self) -> int:
        """The number of different pages."""
        return len(self._table)

    @property
    def slots(self) -> int:
        """The length of a match's rows. Every slot so far is less."""
        return len(self._names)

    def names(self) -> list[str | None]:
        """Worker ids by slot; None for a free slot."""
        return list(self._names)

    def join(self, worker: str) -> int:
        """Add a worker, unless it is there, and return its slot."""
        with self._membership:
            slot = self._slots.get(worker)
            if slot is None:
                slot = self._names.index(None) if None in self._names else len(self._names)
                self._names[slot : slot + 1] = [worker]
                self._slots[worker] = slot
                self.version += 1
            return slot

    def drop(self, worker: str) -> None:
        """A worker is gone. Forget its pages and free its slot."""
        with self._membership:
            slot = self._slots.pop(worker, None)
            if slot is not None:
                self._table.clear(slot, ALL)
                self._names[slot] = None
                self.version += 1

    def reset(self, worker: str) -> None:
        """A worker's process was replaced. Forget its pages, those expected too; it keeps its slot."""
        self._table.clear(self._slots[worker], ALL)

    def apply(self, worker: str, payload: bytes, is_private: bool = False) -> list[Unread]:
        """Apply a batch of the worker's events about its public pages, or its private ones.

        Returns the events that could not be used; raises WireError if none could.
        """
        slot = self._slots[worker]
        if self._table.apply(slot, payload, is_private) >= 0:
            return []
        batch = decode_batch(payload)
        unread = list(batch.unread)
        for event in batch.events:
            try:
                if isinstance(event, BlockStored):
                    self.store(worker, event.block_hashes, event.medium, is_private)
                elif isinstance(event, BlockRemoved):
                    self.remove(worker, event.block_hashes, event.medium)
                elif isinstance(event, AllBlocksCleared):
                    self.clear(worker, is_private)
            except ValueError as error:
                unread.append(Unread(event, str(error), "medium"))
        return unread

    def store(
        self, worker: str, hashes: Sequence[int] | Hashes, medium: str | None, is_private: bool = False
    ) -> None:
        """Pages became reusable. Raises ValueError for an unknown tier."""
        self._table.store(self._slots[worker], _tier(medium), as_hashes(hashes), is_private)

    def remove(self, worker: str, hashes: Sequence[int] | Hashes, medium: str | None) -> None:
        """Pages left a tier. Those that left the device had come: they are not expected any more."""
        slot, tier, pages = self._slots[worker], _tier(medium), as_hashes(hashes)
        self._table.remove(slot, tier, pages)
        if tier is Tier.GPU:
            self._table.remove(slot, Tier.EXPECTED, pages)

    def clear(self, worker: str, is_private: bool = False) -> None:
        """What a worker told of its public pages, or of its private ones, is void. Pages that are expected
        may still come."""
        self._table.clear_told(self._slots[worker], is_private)

    def expect(self, slot: int, hashes: Hashes) -> None:
        """Pages are on their way to the worker in `slot`."""
        self._table.store(slot, Tier.EXPECTED, hashes)

    def unexpect(self, slot: int, hashes: Hashes) -> None:
        """They have come, which an event says, or will not."""
        self._table.remove(slot, Tier.EXPECTED, hashes)

    def held(self, worker: str, tiers: int = HELD) -> set[int]:
        """The pages of a worker in any tier of this mask; {} for an unknown worker. Scans all pages."""
        slot = self._slots.get(worker)
        return set() if slot is None else set(self._table.held(slot, tiers))

    def find(self, hashes: Hashes) -> Matches:
        """Match a prompt against every worker."""
        found = np.empty((4, len(self._names)), np.int32)
        self._table.find(hashes, found)
        return Matches(found)

    def nbytes(self) -> int:
        """Bytes of memory that the pages take."""
        return self._table.nbytes()


def digest_hashes(digests: Sequence[bytes]) -> Hashes:
    """Convert page digests (wire/page_hash.py) to the hashes of the table: the `event_hash` of each."""
    return np.frombuffer(b"".join(digests), ">i8")[::4].astype(np.int64)


def as_hashes(hashes: Sequence[int] | Hashes) -> Hashes:
    """Convert page hashes to an array. Unsigned ones (vLLM's) become signed with the same 64 bits."""
    try:
        return np.array(hashes, np.int64)
    except OverflowError:
        return np.array([page & 0xFFFF_FFFF_FFFF_FFFF for page in hashes], np.uint64).view(np.int64)


def _tier(medium: str | None) -> Tier:
    name = MEDIA.get(medium.upper()) if medium is not None else "GPU"
    if name is None:
        raise ValueError(f"unknown medium {medium!r}")
    return _TIERS[name]
