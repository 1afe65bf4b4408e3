"""Global index: which worker holds which pages, from the KV events they publish.

A page is named by its event hash, a chain over everything before it; so a worker's match is the number of
leading hashes it holds. The pages are in a PageTable (page_table.py); names, slots and what is expected are
here. A slot is given again only after `drop`, and stays a worker's while it is there.

What is *expected* counts as held until it is confirmed by an event, taken back, or too old: else a burst on
one new prefix would be spread over workers that each compute it.

Threads: the event plane's writes (`apply`, `store`, `remove`, `clear`), the event loop does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.index.page_table import ALL, HELD, Hashes, PageTable, Tier, make_page_table
from wire.events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, Unread, decode_batch

_TIERS = {"GPU": Tier.GPU, "CPU": Tier.CPU, "STORAGE": Tier.STORAGE}


class Matches(NamedTuple):
    """One prompt against every worker, in pages.

    `found` is int32 [4, slots], a row per Tier: the first counts all leading pages that a worker holds, the
    others those of them that are nowhere better than there.
    """

    found: npt.NDArray[np.int32]

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """All leading pages, by slot."""
        return self.found[Tier.GPU, :]

    @property
    def host(self) -> npt.NDArray[np.int32]:
        """Of them: in CPU memory."""
        return self.found[Tier.CPU, :]

    @property
    def storage(self) -> npt.NDArray[np.int32]:
        """Of them: in storage."""
        return self.found[Tier.STORAGE, :]

    @property
    def expected(self) -> npt.NDArray[np.int32]:
        """Of them: on their way."""
        return self.found[Tier.EXPECTED, :]


class GlobalIndex:
    """Pages by worker id."""

    def __init__(self, table: PageTable | None = None) -> None:
        self._table: PageTable = table if table is not None else make_page_table()
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []
        self.version = 0  # grows when a slot is given or given up

    def __len__(self) -> int:
        """Different pages known."""
        return len(self._table)

    @property
    def slots(self) -> int:
        """Length of `find`'s rows: every slot given so far is below it."""
        return len(self._names)

    def names(self) -> list[str | None]:
        """Worker ids by slot; None where nobody is."""
        return list(self._names)

    def join(self, worker: str) -> int:
        """A worker that may hold pages: its slot. Joining twice changes nothing."""
        slot = self._slots.get(worker)
        if slot is None:
            slot = self._names.index(None) if None in self._names else len(self._names)
            self._names[slot : slot + 1] = [worker]
            self._slots[worker] = slot
            self.version += 1
        return slot

    def drop(self, worker: str) -> None:
        """A worker is gone, and its pages with it."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._table.clear(slot, ALL)
            self._names[slot] = None
            self.version += 1

    def reset(self, worker: str) -> None:
        """A worker's process was replaced: nothing of what was known or expected holds. It keeps its slot."""
        self._table.clear(self._slots[worker], ALL)

    def apply(self, worker: str, payload: bytes) -> list[Unread]:
        """One event batch. Returns what could not be understood; raises WireError when nothing could."""
        slot = self._slots[worker]
        if self._table.apply(slot, payload) >= 0:
            return []
        batch = decode_batch(payload)
        unread = list(batch.unread)
        for event in batch.events:
            try:
                if isinstance(event, BlockStored):
                    self.store(worker, event.block_hashes, event.medium)
                elif isinstance(event, BlockRemoved):
                    self.remove(worker, event.block_hashes, event.medium)
                elif isinstance(event, AllBlocksCleared):
                    self.clear(worker)
            except ValueError as error:
                unread.append(Unread(event, str(error), "medium"))
        return unread

    def store(self, worker: str, hashes: Sequence[int] | Hashes, medium: str | None) -> None:
        """Pages became reusable. Raises ValueError for a tier nobody knows."""
        self._table.store(self._slots[worker], _tier(medium), as_hashes(hashes))

    def remove(self, worker: str, hashes: Sequence[int] | Hashes, medium: str | None) -> None:
        """Pages left a tier."""
        self._table.remove(self._slots[worker], _tier(medium), as_hashes(hashes))

    def clear(self, worker: str) -> None:
        """A worker's cache was reset. What is on its way may still come."""
        self._table.clear(self._slots[worker], HELD)

    def expect(self, slot: int, hashes: Hashes) -> None:
        """Pages are on their way to the worker in `slot`."""
        self._table.store(slot, Tier.EXPECTED, hashes)

    def unexpect(self, slot: int, hashes: Hashes) -> None:
        """They have come (an event says so), or will not."""
        self._table.remove(slot, Tier.EXPECTED, hashes)

    def held(self, worker: str) -> set[int]:
        """Every page of a worker, in any tier. Scans: for tests and debugging. {} for a stranger."""
        slot = self._slots.get(worker)
        return set() if slot is None else set(self._table.held(slot))

    def find(self, hashes: Hashes) -> Matches:
        """How much of a prompt each worker holds."""
        found = np.empty((4, len(self._names)), np.int32)
        self._table.find(hashes, found)
        return Matches(found)

    def nbytes(self) -> int:
        """Memory of the pages."""
        return self._table.nbytes()


def digest_hashes(digests: Sequence[bytes]) -> Hashes:
    """Page digests (wire/page_hash.py) as the table knows pages: `event_hash` of each."""
    return np.frombuffer(b"".join(digests), ">i8")[::4].astype(np.int64)


def as_hashes(hashes: Sequence[int] | Hashes) -> Hashes:
    """Page hashes as the table takes them. Unsigned ones (vLLM's) become the same 64 bits, signed."""
    try:
        return np.array(hashes, np.int64)
    except OverflowError:
        return np.array([page & 0xFFFF_FFFF_FFFF_FFFF for page in hashes], np.uint64).view(np.int64)


def _tier(medium: str | None) -> Tier:
    name = MEDIA.get(medium.upper()) if medium is not None else "GPU"
    if name is None:
        raise ValueError(f"unknown medium {medium!r}")
    return _TIERS[name]
