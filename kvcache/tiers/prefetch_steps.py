"""PrefetchSteps: how one prefetch proceeds: it asks what is there, takes host pages for it, and reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcache.storage.backend import StorageBackend
from kvcache.tiers.agreement import RankReport, agree
from kvcache.tiers.arrivals import StorageArrivals
from kvcache.tiers.host_tier import HostTier, scattered
from kvcache.tiers.mover import Failed
from kvcache.tiers.prefetch import Prefetch, StorageCounts
from kvcache.tiers.read_lane import ReadLane

_ASK_NAMES = 256
"""Asked for at once: what a prefetch that is stopped still waits for."""
_READ_PAGES, _READ_TOKENS = 32, 512
"""Read at once, likewise: so many tokens in smaller pages. Each time the tree grows by a node."""
_OVER = RankReport({}, 0, is_over=True)


class PrefetchSteps:
    """One worker's. All methods are called on the tree's thread."""

    def __init__(
        self,
        host: HostTier,
        lane: ReadLane,
        backend: StorageBackend,
        arrivals: StorageArrivals,
        counts: StorageCounts,
        clock: Callable[[], float],
        page_size: int,
        is_much: Callable[[int], bool],
        ended: Callable[[Prefetch], None],
    ) -> None:
        """`is_much` says whether so many pages more are too much on the host, `ended` is told of the end."""
        self._host = host
        self._pool = host.pool
        self._parts = host.parts
        self._primary = next(iter(host.parts))
        self._lane = lane
        self._backend = backend
        self._arrivals = arrivals
        self._counts = counts
        self._clock = clock
        self._read_pages = max(_READ_PAGES, _READ_TOKENS // page_size)
        self._is_much = is_much
        self._ended = ended

    def ask(self, prefetch: Prefetch) -> None:
        """Ask what of the key storage has."""

        def ask() -> RankReport | None:
            there = {}
            for group, names in prefetch.stored.asked().items():
                has: list[bool] = []
                for start in range(0, len(names), _ASK_NAMES):
                    began = self._clock()
                    prefetch.stop_if_late(began)
                    if prefetch.is_stopped:
                        return None
                    has += self._backend.exists(names[start : start + _ASK_NAMES])
                    prefetch.seconds += self._clock() - began
                there[group] = np.array(has, np.bool_)
            return RankReport(there, 0, is_over=False)

        self._lane.submit(prefetch.bound_s, ask, lambda told: self._found(prefetch, told))

    def _found(self, prefetch: Prefetch, told: RankReport | Failed | None) -> None:
        """Take host pages for what can be had and used, from the first page of the way on. None: it was
        stopped before it had asked for all."""
        prefetch.stop_if_late(self._clock())
        found = agree([told]) if isinstance(told, RankReport) else _OVER
        way = prefetch.way
        if not found.is_over and not prefetch.is_stopped:
            way = prefetch.stored.way(found.there, self._parts)
        start, _, end = way
        if end == start or self._is_much(end - start):
            self._ended(prefetch)
            return
        wanted = {}
        for group, part in self._parts.items():
            if not part.is_by_page:
                wanted[group] = np.ones(1, np.int32)
                continue
            form = np.zeros(end, np.int32)
            form[part.needed(end)] = 1
            form[:start] = 0
            wanted[group] = form
        taken = self._host.alloc({group: int(form.sum()) for group, form in wanted.items()})
        if taken is None:
            self._ended(prefetch)
            return
        prefetch.way, prefetch.names = way, prefetch.stored.names(way)
        prefetch.ids = {group: scattered(wanted[group], ids) for group, ids in taken.items()}
        self._read_more(prefetch)

    def _read_more(self, prefetch: Prefetch) -> None:
        """Read the next pages; with the last ones those of the other groups."""
        start, _, last = prefetch.way
        begin = start + prefetch.read
        end = min(begin + self._read_pages, last)
        names, pages = self._part(prefetch, self._primary, begin, end)
        if end == last:
            for group, part in self._parts.items():
                if group != self._primary:
                    more = self._part(prefetch, group, start if part.is_by_page else last - 1, last)
                    names, pages = names + more[0], pages + more[1]

        def read() -> RankReport | None:
            if prefetch.is_stopped:
                return None
            began = self._clock()
            is_whole = all(self._backend.get(names, pages))
            prefetch.seconds += self._clock() - began
            return RankReport({}, end - begin if is_whole else 0, is_over=not is_whole)

        def done(told: RankReport | Failed | None) -> None:
            prefetch.stop_if_late(self._clock())
            if told is None and not prefetch.is_stopped:  # it was, and is wanted again
                self._read_more(prefetch)
                return
            arrived = agree([told]) if isinstance(told, RankReport) else _OVER
            if arrived.read:
                prefetch.read += arrived.read
                self._counts.read_pages += arrived.read
                if end == last or len(self._parts) == 1:
                    self._arrivals.enter(prefetch, end)
            if arrived.is_over or end == last:
                self._pool.free(prefetch.ids)
                self._ended(prefetch)
            else:
                self._read_more(prefetch)

        self._lane.submit(prefetch.bound_s, read, done)

    def _part(
        self, prefetch: Prefetch, group: str, begin: int, end: int
    ) -> tuple[list[bytes], list[memoryview]]:
        """Names and host pages of a group's pages [begin, end), or of the state after them."""
        arena, is_by_page = self._pool.arenas[group], self._parts[group].is_by_page
        start = prefetch.way.start
        names = prefetch.names[group][begin - start : end - start]
        ids = prefetch.ids[group][begin:end] if is_by_page else prefetch.ids[group]
        kept = [(name, arena.view(page)) for name, page in zip(names, ids.tolist(), strict=True) if page]
        return [name for name, _ in kept], [page for _, page in kept]
