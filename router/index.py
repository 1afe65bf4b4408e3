"""Global index: which worker holds which pages, from the KV events they publish.

A page is named by its event hash, a chain over everything before it; so a worker's match is the number of
leading hashes it holds. One dict of hash -> bit mask of workers per tier: a lookup walks the prompt's hashes
once for ALL workers, and stops when nobody holds the next. (A set per worker walks once for each.)

Threads: one writer (event_plane.py). `find` only looks keys up and may run on any thread meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wire.events import MEDIA

_TIERS = ("GPU", "CPU", "STORAGE")


class GlobalIndex:
    """Pages by worker id."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[int, int]] = {tier: {} for tier in _TIERS}
        self._bits: dict[str, int] = {}  # worker id -> its bit
        self._names: dict[int, str] = {}  # the inverse

    def __len__(self) -> int:
        """Pages known, each counted once per tier."""
        return sum(len(pages) for pages in self._tiers.values())

    def join(self, worker: str) -> None:
        """A worker that may hold pages. Joining twice changes nothing."""
        if worker in self._bits:
            return
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._names[bit] = worker
        self._bits[worker] = bit

    def drop(self, worker: str) -> None:
        """A worker is gone, and its pages with it."""
        if worker in self._bits:
            self.clear(worker)
            del self._names[self._bits.pop(worker)]

    def store(self, worker: str, hashes: Iterable[int], medium: str | None) -> None:
        """Pages became reusable. Raises ValueError for a tier nobody knows."""
        pages, bit = self._tier(medium), self._bits[worker]
        for page in hashes:
            pages[page] = pages.get(page, 0) | bit

    def remove(self, worker: str, hashes: Iterable[int], medium: str | None) -> None:
        """Pages left a tier."""
        pages, bit = self._tier(medium), self._bits[worker]
        for page in hashes:
            left = pages.get(page, 0) & ~bit
            if left:
                pages[page] = left
            else:
                pages.pop(page, None)

    def clear(self, worker: str) -> None:
        """A worker's cache was reset."""
        bit = self._bits[worker]
        for pages in self._tiers.values():
            for page in [page for page, holders in pages.items() if holders & bit]:
                left = pages[page] & ~bit
                if left:
                    pages[page] = left
                else:
                    del pages[page]

    def held(self, worker: str) -> set[int]:
        """Every page of a worker, in any tier. Scans: for tests and debugging. {} for a stranger."""
        bit = self._bits.get(worker, 0)
        return {
            page for pages in self._tiers.values() for page, holders in list(pages.items()) if holders & bit
        }

    def find(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading pages of `hashes` that each worker holds, in any tier; workers with none are absent."""
        gpu, cpu, storage = (self._tiers[tier].get for tier in _TIERS)
        matched: dict[str, int] = {}
        alive = -1
        for depth, page in enumerate(hashes):
            still = alive & (gpu(page, 0) | cpu(page, 0) | storage(page, 0))
            if still != alive:
                if depth:
                    self._note(matched, alive & ~still, depth)
                alive = still
                if not alive:
                    return matched
        if hashes:
            self._note(matched, alive, len(hashes))
        return matched

    def _note(self, matched: dict[str, int], holders: int, depth: int) -> None:
        while holders:
            bit = holders & -holders
            holders ^= bit
            name = self._names.get(bit)
            if name is not None:
                matched[name] = depth

    def _tier(self, medium: str | None) -> dict[int, int]:
        tier = MEDIA.get(medium.upper()) if medium is not None else "GPU"
        if tier is None:
            raise ValueError(f"unknown medium {medium!r}")
        return self._tiers[tier]
