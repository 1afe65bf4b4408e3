"""Feed: one worker's KV events, from its two sockets into the index.

Live batches come by SUB; a DEALER asks for what is missing: on joining (whatever was published before), on a
gap, and every half second, because the last batch before a silence may be the lost one, and the publisher may
be another by now (router/events/ordering.py). What cannot be had makes the worker's pages unknown: they are
forgotten, because a hit that is not there costs more than one that is not seen.

All of it on the event plane's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import zmq

from common.errors import WireError
from router.events.counters import EventCounters
from router.events.ordering import EventOrdering, OrderingStep, Verdict
from router.events.sockets import Sockets
from wire.events import Unread, begins_with_clear
from wire.records import WorkerRecord

log = logging.getLogger("router.events.event_plane")

_REPLAY_EVERY_S = 0.5
_REPLAY_AT_MOST_EVERY_S = 0.02  # a publisher whose replay does not close the gap is not asked in a tight loop
_STALLED_S = 2.0  # nothing of a reply for so long: its connection is given up, and a new one asks
_GIVE_UP_S = 5.0  # a gap that stays open for so long is lost
_AGAIN_S = 5.0  # a worker of ours that is known in part is asked for a snapshot so often
_AT_ONCE = 1000  # messages, so that a flood from one worker does not starve the others
_END = -1


class Known(Enum):
    """How much of what a worker holds is in the index. What is not there is never believed to be."""

    NOTHING_YET = auto()
    ALL = auto()
    IN_PART = auto()  # what was published before a certain batch is not known of


class Reader(Protocol):
    """Applies one worker's batches to the index."""

    def apply(self, payload: bytes) -> Sequence[Unread]:
        """One batch. Returns what could not be used; raises WireError when nothing could."""

    def clear(self) -> None:
        """Forget all pages of this worker."""


class Feed:
    """One worker. `tick` it often; close it."""

    _events: zmq.Socket[bytes]
    _monitor: zmq.Socket[bytes] | None  # of the live connection; None: it does not matter
    _replay: zmq.Socket[bytes] | None  # None: the publisher has none

    def __init__(
        self, record: WorkerRecord, sockets: Sockets, reader: Reader, counters: EventCounters
    ) -> None:
        """Raises ZMQError for addresses that are none."""
        self.record = record
        self._sockets = sockets
        self._reader = reader
        self._counters = counters
        self._repair = EventOrdering()
        self.known = Known.NOTHING_YET
        self._connect()
        self._asked_at = self._heard_at = self._known_at = float("-inf")
        self._stuck_at: int | None = None  # the batch that is missing, and since when
        self._stuck_since = 0.0
        self._now = 0.0

    @property
    def hurried(self) -> bool:
        """A tick should come soon."""
        return self._repair.gap or self._repair.doubtful or self._repair.reply_due

    def close(self) -> None:
        """Close the sockets. The index keeps what it has."""
        if self._monitor is not None:
            self._events.disable_monitor()
            self._sockets.close(self._monitor)
        self._sockets.close(self._events)
        if self._replay is not None:
            self._sockets.close(self._replay)

    # -- asking ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ask for what is missing, or give it up. `now` is of the monotonic clock."""
        self._now = now
        if self._repair.reply_due and now - self._heard_at >= _STALLED_S:
            self._give_up_reply()
        if self._gave_up() or self._tried_again():
            return
        waited = now - self._asked_at
        wanted = self._repair.gap or self._repair.doubtful
        if (wanted and waited >= _REPLAY_AT_MOST_EVERY_S) or waited >= _REPLAY_EVERY_S:
            self._ask()

    def _ask(self) -> None:
        if self._replay is None or self._repair.reply_due:
            return
        start = self._repair.ask()
        self._asked_at = self._heard_at = self._now
        try:
            self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.Again:  # the queue to a peer that does not answer is full: a new connection will ask
            log.debug("worker %s: its replay socket takes nothing", self.record.id)

    def _give_up_reply(self) -> None:
        """It may have broken off with its connection. Another one cannot mix up two replies."""
        if self._replay is not None:
            self._sockets.close(self._replay)
        self._replay = self._connect_replay()
        self._obey(OrderingStep((), self._repair.abandon()))

    def _gave_up(self) -> bool:
        """A gap, or a doubt about the live stream, that no reply settles."""
        repair = self._repair
        if not (repair.gap or repair.doubtful or (self._stuck_at is not None and repair.reply_due)):
            self._stuck_at = None
            return False
        if self._stuck_at is None:
            self._counters.gaps += repair.gap
        if self._stuck_at != repair.expected:
            self._stuck_at, self._stuck_since = repair.expected, self._now
        if self._replay is not None and self._now - self._stuck_since < _GIVE_UP_S:
            return False
        log.warning("worker %s: missing events cannot be had; its pages are forgotten", self.record.id)
        self._counters.resets += 1
        if repair.doubtful:
            self._start_over()
        else:
            self._stuck_at = None
            self._forget()
            self._apply(repair.skip())
        return True

    def _tried_again(self) -> bool:
        """A publisher of ours can always say all that its worker holds."""
        ours = self._replay is not None and self.record.page_hashes == "baton"
        if not ours or self.known is not Known.IN_PART or self._now - self._known_at < _AGAIN_S:
            return False
        self._start_over()
        return True

    # -- reading -----------------------------------------------------------------------------------

    def _read_events(self) -> None:
        self._read_monitor()
        events, repair = self._events, self._repair
        for _ in range(_AT_ONCE):
            try:
                frames = events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != 8:
                self._counters.bad(self.record.id, "frames", "not [topic, 8-byte number, batch]")
                continue
            self._apply(repair.live(int.from_bytes(frames[1], "big"), frames[2]))

    def _read_replay(self) -> None:
        socket = self._replay
        for _ in range(_AT_ONCE):
            if socket is None or socket is not self._replay:
                return  # it was given up in between
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = self._now
            if len(frames) not in (3, 4) or len(frames[-2]) != 8:  # older framing has no topic
                self._counters.bad(self.record.id, "frames", "not a reply to a replay request")
                continue
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number == _END:
                step = self._repair.ended()
                if self.known is Known.NOTHING_YET:
                    self.known = Known.ALL
            else:
                step = self._repair.replayed(number, frames[-1])
            self._obey(step)

    def _obey(self, step: OrderingStep) -> None:
        if step.verdict is Verdict.START_OVER:
            log.warning("worker %s: its event stream is another one; its pages are forgotten", self.record.id)
            self._counters.restarts += 1
            self._start_over()
            return
        if step.verdict is Verdict.REPLACES:
            self._replace(step.ready[0])
        self._apply(step.ready)

    def _replace(self, first: bytes) -> None:
        """A reply begins later than asked. It says all that there is if its first event is a clear."""
        if begins_with_clear(first):
            self._counters.snapshots += 1
            self._reader.clear()
            self.known = Known.ALL
        else:
            log.warning("worker %s: old events are lost; its pages are forgotten", self.record.id)
            self._counters.resets += 1
            self._forget()

    def _apply(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            try:
                unread = self._reader.apply(payload)
            except WireError as error:
                self._counters.bad(self.record.id, "batch", str(error))
                continue
            self._counters.batches += 1
            for event in unread:
                self._counters.bad(self.record.id, event.kind, event.reason)

    def _forget(self) -> None:
        self._reader.clear()
        self.known, self._known_at = Known.IN_PART, self._now

    def _start_over(self) -> None:
        """As if the worker had just joined; what is on its way to the old sockets is lost with them."""
        self._reader.clear()
        self.known = Known.NOTHING_YET
        self._stuck_at = None
        self.close()
        self._repair = EventOrdering()
        self._connect()
        self._ask()

    def _connect(self) -> None:
        self._events = self._sockets.connect(zmq.SUB, self.record.events, self._read_events)
        try:
            self._replay = self._connect_replay()
        except zmq.ZMQError:
            self._sockets.close(self._events)
            raise
        # Workers of ours have fresh addresses when they are started again; others may come back at the same.
        self._monitor = None
        if self.record.page_hashes == "foreign":
            self._monitor = self._events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._sockets.watch(self._monitor, self._read_monitor)

    def _connect_replay(self) -> zmq.Socket[bytes] | None:
        if not self.record.replay:
            return None
        return self._sockets.connect(zmq.DEALER, self.record.replay, self._read_replay)

    def _read_monitor(self) -> None:
        """The publisher hung up. Who answers at its address next may be another."""
        if self._monitor is not None and self._monitor.poll(0):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            self._repair.doubt()
