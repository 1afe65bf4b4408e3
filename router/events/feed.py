"""Feed: one stream of a worker's KV events, from its publisher into the index.

A replay is requested on joining (for what was published before), when batches are missing, and every half
second, because the last batch before a silence may be the lost one, and the publisher may be another by now
(ordering.py). When missing batches cannot be replayed, the stream's pages are forgotten, because a page that
is wrongly believed to be there costs more than one that is not known. A worker's other stream, and what it
has told, is left alone.

Sockets may fail: there may be no descriptor for them at the moment. Then this stream begins anew later, as if
the worker joined then, and no other stream is harmed.

All of it runs on the event plane's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

import zmq

from common.errors import WireError
from common.quiet_log import QuietLog
from router.events.connection import EventSource, PublisherConnection
from router.events.counters import EventCounters
from router.events.ordering import EventOrdering, OrderingStep, Verdict
from router.events.sockets import Sockets
from wire.events import Unread, begins_with_clear
from wire.records import PageHashes

log = logging.getLogger("router.events.event_plane")

_REPLAY_EVERY_S = 0.5
_REPLAY_AT_MOST_EVERY_S = 0.02  # when a replay does not close the gap
_STALLED_S = 2.0  # a replay of which nothing comes for this long is abandoned
_GIVE_UP_S = 5.0  # batches that are missing for this long are lost
_SNAPSHOT_EVERY_S = 5.0  # while a stream of ours is known in part
_OPEN_AGAIN_S = 0.5  # after the sockets have failed; twice as long after each failure in a row, at most:
_OPEN_AGAIN_AT_MOST_S = 10.0
_END = -1


class Known(Enum):
    """How much of what a stream tells is in the index. The index never has more than the worker."""

    NOTHING = auto()
    ALL = auto()
    PART = auto()  # batches before some point are lost


class Reader(Protocol):
    """Applies the batches of one stream to the index."""

    def apply(self, payload: bytes) -> Sequence[Unread]:
        """Apply one batch. Returns the events that could not be used; raises WireError when none could."""

    def clear(self) -> None:
        """Forget all pages of this stream."""


class Feed:
    """One stream. Call `tick` often; close it."""

    def __init__(
        self,
        source: EventSource,
        hashes: PageHashes,
        sockets: Sockets,
        reader: Reader,
        counters: EventCounters,
    ) -> None:
        """`hashes`: see WorkerRecord.page_hashes. The first `tick` opens the sockets."""
        self._source = source
        self._ours = hashes == "baton"
        self.known = Known.NOTHING
        self._reader = reader
        self._counters = counters
        self._ordering = EventOrdering()
        self._connection = PublisherConnection(
            source, not self._ours, sockets, self._read_live, self._read_replay
        )
        self._open_at = self._requested_at = self._heard_at = self._forgot_at = float("-inf")
        self._open_again_s = _OPEN_AGAIN_S
        self._quiet = QuietLog(log)
        self._missing: int | None = None  # the first missing batch
        self._missing_since = 0.0

    @property
    def name(self) -> str:
        """The stream's, for people."""
        return self._source.name

    @property
    def urgent(self) -> bool:
        """Whether the next tick should come soon."""
        ordering = self._ordering
        return ordering.gap or ordering.distrusted or ordering.replaying

    def close(self) -> None:
        """Close the sockets. The index keeps what it has."""
        self._connection.close()

    # -- requests ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Request what is missing, or give it up. `now` is of the monotonic clock."""
        with self._failing_alone(now):
            if self._connection.is_open:
                self._request_missing(now)
            elif now >= self._open_at:
                self._open(now)

    def _open(self, now: float) -> None:
        self._connection.open()
        self._open_again_s = _OPEN_AGAIN_S
        self._request_replay(now)

    @contextmanager
    def _failing_alone(self, now: float) -> Iterator[None]:
        """If the sockets fail, close them and forget the stream until they are opened again."""
        was_open = self._connection.is_open
        try:
            yield
        except (WireError, zmq.ZMQError, OSError) as error:
            if self._open_again_s == _OPEN_AGAIN_S:  # the first failure in a row
                self._quiet.warning("worker %s: its events cannot be followed now: %s", self.name, error)
            if was_open:
                self._reset()
            else:  # nothing was told
                self.close()
            self._open_at = now + self._open_again_s
            self._open_again_s = min(2 * self._open_again_s, _OPEN_AGAIN_AT_MOST_S)

    def _request_missing(self, now: float) -> None:
        ordering = self._ordering
        if ordering.replaying and now - self._heard_at >= _STALLED_S:
            self._connection.reconnect_replay()
            self._take(OrderingStep((), ordering.abandon_replay()), now)
        self._watch_missing(now)
        can_replay = self._connection.can_replay
        is_lost = not can_replay or now - self._missing_since >= _GIVE_UP_S
        in_part = can_replay and self._ours and self.known is Known.PART
        if self._missing is not None and is_lost:
            self._give_up_missing(now)
        elif in_part and now - self._forgot_at >= _SNAPSHOT_EVERY_S:
            self._start_over(now)  # a publisher of ours sends a snapshot for what it cannot replay
        else:
            waited = now - self._requested_at
            wanted = self._ordering.gap or self._ordering.distrusted
            if (wanted and waited >= _REPLAY_AT_MOST_EVERY_S) or waited >= _REPLAY_EVERY_S:
                self._request_replay(now)

    def _watch_missing(self, now: float) -> None:
        """Note since when the same batch is missing, or live batches are distrusted."""
        ordering = self._ordering
        if not (ordering.gap or ordering.distrusted or (self._missing is not None and ordering.replaying)):
            self._missing = None
            return
        if self._missing is None:
            self._counters.gaps += ordering.gap
        if self._missing != ordering.expected:
            self._missing, self._missing_since = ordering.expected, now

    def _give_up_missing(self, now: float) -> None:
        log.warning("worker %s: missing events cannot be replayed; its pages are forgotten", self.name)
        self._counters.resets += 1
        if self._ordering.distrusted:
            self._start_over(now)
        else:
            self._missing = None
            self._forget(now)
            self._apply(self._ordering.skip_gap())

    def _request_replay(self, now: float) -> None:
        if not self._connection.can_replay or self._ordering.replaying:
            return
        self._requested_at = self._heard_at = now
        if not self._connection.request(self._ordering.request_replay()):  # abandoned after _STALLED_S
            log.debug("worker %s: the queue to its replay socket is full", self.name)

    # -- reading -----------------------------------------------------------------------------------

    def _read_live(self, now: float) -> None:
        with self._failing_alone(now):
            if self._connection.lost():
                self._ordering.distrust()  # another publisher may answer at this address next
            ordering = self._ordering
            for frames in self._connection.live():
                if len(frames) != 3 or len(frames[1]) != 8:
                    self._counters.bad(self.name, "frames", "not [topic, 8-byte number, batch]")
                else:
                    self._apply(ordering.live(int.from_bytes(frames[1], "big"), frames[2]))

    def _read_replay(self, now: float) -> None:
        with self._failing_alone(now):
            for frames in self._connection.replay():
                self._heard_at = now
                self._take_reply(frames, now)

    def _take_reply(self, frames: list[bytes], now: float) -> None:
        if len(frames) not in (3, 4) or len(frames[-2]) != 8:  # older framing has no topic
            self._counters.bad(self.name, "frames", "not a reply to a replay request")
            return
        number = int.from_bytes(frames[-2], "big", signed=True)
        if number == _END:
            step = self._ordering.replay_ended()
            if self.known is Known.NOTHING:
                self.known = Known.ALL
        else:
            step = self._ordering.replayed(number, frames[-1])
        self._take(step, now)

    def _take(self, step: OrderingStep, now: float) -> None:
        if step.verdict is Verdict.START_OVER:
            log.warning("worker %s: its event stream is another one; its pages are forgotten", self.name)
            self._counters.restarts += 1
            self._start_over(now)
            return
        if step.verdict is Verdict.REPLACE:
            self._replace(step.batches[0], now)
        self._apply(step.batches)

    def _replace(self, first: bytes, now: float) -> None:
        """A replay begins later than requested. It has all pages if its first event is a clear."""
        if begins_with_clear(first):
            self._counters.snapshots += 1
            self._reader.clear()
            self.known = Known.ALL
        else:
            log.warning("worker %s: old events are lost; its pages are forgotten", self.name)
            self._counters.resets += 1
            self._forget(now)

    def _apply(self, batches: Sequence[bytes]) -> None:
        for batch in batches:
            try:
                unread = self._reader.apply(batch)
            except WireError as error:
                self._counters.bad(self.name, "batch", str(error))
                continue
            self._counters.batches += 1
            for event in unread:
                self._counters.bad(self.name, event.kind, event.reason)

    def _forget(self, now: float) -> None:
        self._reader.clear()
        self.known, self._forgot_at = Known.PART, now

    def _start_over(self, now: float) -> None:
        """Begin as if the worker had just joined, with new sockets."""
        self._reset()
        self._open(now)

    def _reset(self) -> None:
        """Close the sockets, and forget what they told."""
        self.close()
        self._reader.clear()
        self.known = Known.NOTHING
        self._missing = None
        self._ordering = EventOrdering()
