"""EventPlane: follows every worker's KV events and keeps the global index up to date.

One thread owns the sockets and is the only writer of the index. It has a Feed (feed.py) for each stream of a
worker: one of public pages and, of Baton's own workers, one of private pages. The streams have no common
order, and none is needed: no page is in both under one name. One other thread calls `follow`, `forget` and
`close`. A worker that was restarted has a new incarnation in its record, and its old pages are dropped at
once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import zmq

from router.events.connection import EventSource, sources_of
from router.events.counters import EventCounters
from router.events.external_engine import ExternalHashes, ExternalReader
from router.events.feed import Feed, Known, Reader
from router.events.sockets import Sockets
from router.index.global_index import GlobalIndex
from wire.events import Unread
from wire.records import WorkerRecord
from wire.security import Curve
from wire.sockets import open_context

log = logging.getLogger(__name__)

_TICK_S = 0.1
_URGENT_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Followed:
    """A worker, and its streams."""

    incarnation: int
    feeds: list[Feed]


class EventPlane:
    """Fills an index from the workers that `follow` names. Close it."""

    def __init__(self, index: GlobalIndex, curve: Curve | None) -> None:
        self._index = index
        self.counters = EventCounters()
        self._context = open_context()
        self._sockets = Sockets(self._context, curve)
        self._followed: dict[str, _Followed] = {}
        self._commands: deque[tuple[str, WorkerRecord | None]] = deque()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_out = self._context.socket(zmq.PAIR)
        address = f"inproc://events-{id(self)}"
        self._wake_in.bind(address)
        self._wake_out.connect(address)
        self._sockets.watch(self._wake_in, self._take_commands)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def follow(self, record: WorkerRecord) -> None:
        """Follow a worker, or the new incarnation of one."""
        self._commands.append((record.id, record))
        self._wake()

    def forget(self, worker: str) -> None:
        """A worker is gone. Drop its pages."""
        self._commands.append((worker, None))
        self._wake()

    @property
    def running(self) -> bool:
        """Whether the thread lives. Without it the index stays as it is."""
        return self._thread.is_alive()

    def unsure(self) -> list[str]:
        """Workers that may hold pages that are not in the index."""
        followed = list(self._followed.items())
        return [worker for worker, one in followed if any(feed.known is not Known.ALL for feed in one.feeds)]

    @property
    def bad_events(self) -> int:
        """Events that could not be used. `counters` has them by kind."""
        return self.counters.bad_events_total

    @property
    def resets(self) -> int:
        """How often a worker's pages were forgotten because events were lost."""
        return self.counters.resets

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)
        self._context.destroy(linger=0)

    def _wake(self) -> None:
        with suppress(zmq.Again):  # the thread has yet to read what is queued
            self._wake_out.send(b"", zmq.NOBLOCK)

    # -- our thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            ticked_at = tick_s = 0.0
            while not self._closing:
                self._sockets.poll(tick_s)
                now = time.monotonic()
                if now - ticked_at >= tick_s:
                    ticked_at = now
                    for feed in self._feeds():
                        feed.tick(now)
                urgent = any(feed.urgent for feed in self._feeds())
                tick_s = _URGENT_TICK_S if urgent else _TICK_S
        except BaseException:
            log.exception("the event plane has failed; the index is no longer updated")
            raise

    def _feeds(self) -> Iterator[Feed]:
        for followed in self._followed.values():
            yield from followed.feeds

    def _take_commands(self, now: float) -> None:
        self._wake_in.recv()
        while self._commands:
            self._follow_or_forget(*self._commands.popleft(), now)

    def _follow_or_forget(self, worker: str, record: WorkerRecord | None, now: float) -> None:
        followed = self._followed.get(worker)
        if followed is not None and (record is None or record.incarnation != followed.incarnation):
            for feed in followed.feeds:
                feed.close()
                self.counters.forget(feed.name)
            del self._followed[worker]
            if record is not None:
                self._index.reset(worker)
        if record is None:
            self._index.drop(worker)  # also one without events: placement has joined it to the index
            return
        if worker in self._followed or not (sources := sources_of(record)):
            return
        self._index.join(worker)
        feeds = [
            Feed(source, record.page_hashes, self._sockets, self._reader(record, source), self.counters)
            for source in sources
        ]
        self._followed[worker] = _Followed(record.incarnation, feeds)
        for feed in feeds:
            feed.tick(now)

    def _reader(self, record: WorkerRecord, source: EventSource) -> Reader:
        if record.page_hashes == "foreign":
            hashes = ExternalHashes(record.model, record.groups[0].page_size)
            return ExternalReader(self._index, record.id, hashes)
        return _OwnReader(self._index, record.id, source.is_private)


class _OwnReader:
    """Applies the batches of a stream of a Baton worker, whose hashes the index uses."""

    def __init__(self, index: GlobalIndex, worker: str, is_private: bool) -> None:
        self._index = index
        self._worker = worker
        self._is_private = is_private

    def apply(self, payload: bytes) -> list[Unread]:
        return self._index.apply(self._worker, payload, self._is_private)

    def clear(self) -> None:
        self._index.clear(self._worker, self._is_private)
