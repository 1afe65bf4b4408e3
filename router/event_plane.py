"""Event plane: subscribes to every worker's KV events and keeps the global index.

Per worker a SUB socket on its `events` and a DEALER on its `replay`. A replay is asked for on joining
(whatever was published before), on a gap, and once a second, because the last batch before a silence may be
the lost one. What even the replay buffer no longer has makes the worker's pages unknown: they are forgotten,
because a hit that is not there costs more than one that is not seen.

One thread owns the sockets and is the index's only writer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import zmq

from router.index import GlobalIndex
from router.sequence import SequenceRepair
from wire.errors import WireError
from wire.records import WorkerRecord
from wire.security import Curve

log = logging.getLogger(__name__)

_REPLAY_EVERY_S = 1.0
_REPLAY_AT_MOST_EVERY_S = 0.02  # a publisher whose replay does not close the gap is not asked in a tight loop
_END = -1


@dataclass(slots=True)
class _Feed:
    record: WorkerRecord
    events: zmq.Socket[bytes]
    replay: zmq.Socket[bytes]
    repair: SequenceRepair = field(default_factory=SequenceRepair)
    asked_at: float = 0.0
    asking: bool = False


class EventPlane:
    """Feeds an index from the workers that `follow` names. Close it."""

    def __init__(self, index: GlobalIndex, curve: Curve | None) -> None:
        self._index = index
        self._curve = curve
        self._context = zmq.Context()
        self._feeds: dict[str, _Feed] = {}
        self._commands: deque[tuple[str, WorkerRecord | None]] = deque()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_out = self._context.socket(zmq.PAIR)
        address = f"inproc://events-{id(self)}"
        self._wake_in.bind(address)
        self._wake_out.connect(address)
        self._poller = zmq.Poller()
        self._closing = False
        self.batches = 0
        self.bad_events = 0
        self.gaps = 0
        self.resets = 0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def follow(self, record: WorkerRecord) -> None:
        """A worker (or a new incarnation of one) is there. One thread calls follow, forget and close."""
        self._commands.append((record.id, record))
        self._wake_out.send(b"")

    def forget(self, worker: str) -> None:
        """A worker is gone: drop its pages."""
        self._commands.append((worker, None))
        self._wake_out.send(b"")

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        if self._closing:
            return
        self._closing = True
        self._wake_out.send(b"")
        self._thread.join(timeout=5.0)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        self._poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(self._poller.poll(int(self._longest_wait_s() * 1000)))
            if self._wake_in in ready:
                self._wake_in.recv()
            while self._commands:
                self._obey(*self._commands.popleft())
            now = time.monotonic()
            for feed in self._feeds.values():
                if feed.events in ready:
                    self._read_events(feed)
                if feed.replay in ready:
                    self._read_replay(feed)
                self._ask_if_due(feed, now)

    def _longest_wait_s(self) -> float:
        gap = any(feed.repair.gap for feed in self._feeds.values())
        return _REPLAY_AT_MOST_EVERY_S if gap else _REPLAY_EVERY_S / 2

    def _obey(self, worker: str, record: WorkerRecord | None) -> None:
        feed = self._feeds.get(worker)
        if feed is not None and (record is None or record.incarnation != feed.record.incarnation):
            for socket in (feed.events, feed.replay):
                self._poller.unregister(socket)
                socket.close(linger=0)
            del self._feeds[worker]
            self._index.drop(worker)
        if record is not None and record.events and worker not in self._feeds:
            self._index.join(worker)
            self._feeds[worker] = _Feed(
                record, self._connect(zmq.SUB, record.events), self._connect(zmq.DEALER, record.replay)
            )

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        if self._curve is not None:
            self._curve.connect(socket)
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _ask_if_due(self, feed: _Feed, now: float) -> None:
        waited = now - feed.asked_at
        again = feed.repair.gap and not feed.asking and waited >= _REPLAY_AT_MOST_EVERY_S
        if again or waited >= _REPLAY_EVERY_S:
            if feed.repair.gap:
                self.gaps += 1
            feed.asking = True
            feed.asked_at = now
            start = feed.repair.expected.to_bytes(8, "big")
            try:
                feed.replay.send_multipart([b"", start], zmq.NOBLOCK)
            except zmq.Again:  # not connected yet: again in a second
                feed.asking = False

    def _read_events(self, feed: _Feed) -> None:
        for _ in range(1000):  # so that a flood from one worker does not starve the others
            try:
                frames = feed.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3:
                self.bad_events += 1
                continue
            self._apply(feed, feed.repair.live(int.from_bytes(frames[1], "big"), frames[2]))

    def _read_replay(self, feed: _Feed) -> None:
        for _ in range(1000):
            try:
                frames = feed.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) >= 3 else _END
            if number == _END:
                feed.asking = False
                continue
            ready, lost = feed.repair.replayed(number, frames[-1])
            if lost:
                self.resets += 1
                log.warning(
                    "worker %s: events before %d are lost; its pages are forgotten", feed.record.id, number
                )
                self._index.clear(feed.record.id)
            self._apply(feed, ready)

    def _apply(self, feed: _Feed, payloads: list[bytes]) -> None:
        for payload in payloads:
            try:
                unread = self._index.apply(feed.record.id, payload)
            except WireError as error:
                self.bad_events += 1
                log.warning("worker %s: %s", feed.record.id, error)
                continue
            self.batches += 1
            for event in unread:
                self.bad_events += 1
                log.warning("worker %s: unread event: %s", feed.record.id, event.reason)
