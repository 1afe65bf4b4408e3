"""EventPublisher: KV events over ZeroMQ, with a replay socket, in the frames vLLM and SGLang use.

PUB frames: topic, 8-byte big-endian sequence number from 0, batch. A subscriber that missed some asks the
replay ROUTER with `["", first wanted number]` and gets `["", topic, number, batch]` each, then the end marker
`["", "", -1, ""]`. The last `buffer_batches` are kept, as far as `buffer_bytes`
hold them. A request for an older batch is answered with a
snapshot in the same frames: AllBlocksCleared, then BlockStored events for all that is cached, under the
numbers up to the last one published before the snapshot was taken. The next published batch follows. A reader
without support for snapshots sees batches that begin later than it asked, and ends with the right pages.

A snapshot never has more batches than are kept. So its numbers are larger than the wanted one, which is older
than these, and no reader takes them for batches that it has seen.

Private pages are published on a second pair of sockets, with numbers, a buffer and snapshots of its own. The
two streams have no common order: no page is on both under one name, and AllBlocksCleared is about its own
stream.

Threads: `publish` and `publish_snapshot` never block. The publisher's thread owns all sockets; it never
waits for a subscriber, so its queue stays short. The tree belongs to its owner's thread: when a peer needs a
snapshot, `snapshot_wanted` becomes true, `on_snapshot_wanted` is called on the publisher's thread, and the
owner calls `publish_snapshot`. Peers that wait share one. The publisher's thread encodes it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from common.errors import ConfigError
from kvcache.config import KVEventsConfig
from kvcache.event_stream import EventStream
from kvcache.snapshot import TreeSnapshot
from wire.events import AnyEvent
from wire.security import Curve
from wire.zap import ZapHandler, end_context

_ROUND_MS = 250


class _Queued(NamedTuple):
    at: float  # of the Unix clock
    stream: EventStream
    what: Sequence[AnyEvent] | TreeSnapshot


class EventPublisher:
    """Publishes batches. Close it, or use it as a context manager."""

    def __init__(
        self,
        config: KVEventsConfig,
        curve: Curve | None = None,
        on_snapshot_wanted: Callable[[], None] | None = None,
    ) -> None:
        """Bind the sockets on `config.interface`; with `curve`, only members of the cluster can connect.

        Without `on_snapshot_wanted` there are no snapshots: a replay from too old a start begins later.
        Raises ConfigError when no port can be had.
        """
        self._queue: deque[_Queued] = deque()
        self._on_snapshot_wanted = on_snapshot_wanted
        self._wanted = False  # set on the publisher's thread, reset by publish_snapshot
        self._secret = config.secret
        self.beats = 0  # rounds of the thread and messages that it sent: several a second
        self._context = zmq.Context()
        self._zap = None if curve is None else ZapHandler(self._context, curve.is_reader)
        try:
            self.public, self.private = (
                EventStream(self._context, config, curve, self._beat) for _ in range(2)
            )
        except ConfigError:
            end_context(self._context, self._zap, linger_ms=0)
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the threads live."""
        return self._thread.is_alive() and (self._zap is None or self._zap.running)

    @property
    def snapshot_wanted(self) -> bool:
        """A peer waits for `publish_snapshot`."""
        return self._wanted

    def publish(self, public: Sequence[AnyEvent], private: Sequence[AnyEvent] = ()) -> None:
        """Send the events of each stream as one batch, stamped with the time of this call. No events are no
        batch."""
        if public:
            self._put(self.public, public)
        if private:
            self._put(self.private, private)

    def publish_snapshot(self, public: TreeSnapshot, private: TreeSnapshot) -> None:
        """Send the waiting peers all that the tree holds. The snapshots must be of the tree after everything
        published so far, and before everything published later: call it from where `publish` is called."""
        self._wanted = False
        self._put(self.public, public)
        self._put(self.private, private)

    def close(self) -> None:
        """Send what is queued, stop the thread and free the ports. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5.0)
        end_context(self._context, self._zap)
        os.close(self._wake)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, stream: EventStream, what: Sequence[AnyEvent] | TreeSnapshot) -> None:
        assert not self._closing, "the publisher is closed"
        self._queue.append(_Queued(time.time(), stream, what))
        os.eventfd_write(self._wake, 1)

    # -- the publisher's thread --------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        streams = self.public, self.private
        for stream in streams:
            poller.register(stream.replay, zmq.POLLIN)
        while not self._closing:
            self._beat()
            ready = dict(poller.poll(_ROUND_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._secret is not None:
                self._secret.refresh(time.monotonic())  # for the recorder, which does not look at files
            self._flush()
            for stream in streams:
                if stream.replay in ready:
                    self._answer(stream)
        self._flush()

    def _beat(self) -> None:
        self.beats += 1

    def _flush(self) -> None:
        while self._queue:
            at, stream, what = self._queue.popleft()
            if isinstance(what, TreeSnapshot):
                stream.send_snapshot(at, what)
            else:
                stream.send(at, what)

    def _answer(self, stream: EventStream) -> None:
        tell_owner = self._on_snapshot_wanted
        if stream.answer(gives_snapshots=tell_owner is not None) and tell_owner is not None:
            self._wanted = True
            tell_owner()
