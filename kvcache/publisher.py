"""EventPublisher: KV events over ZeroMQ, with a replay socket, in the frames vLLM and SGLang use.

PUB frames: topic, 8-byte big-endian sequence number from 0, batch. A subscriber that missed some asks the
replay ROUTER with `["", first wanted number]` and gets `["", topic, number, batch]` each, then the end marker
`["", "", -1, ""]`. The last `buffer_batches` are kept. A request for an older batch is answered with a
snapshot in the same frames: AllBlocksCleared, then BlockStored events for all that is cached, under the
numbers up to the last one published before the snapshot was taken. The next published batch follows. A reader
without support for snapshots sees batches that begin later than it asked, and ends with the right pages.

A snapshot never has more batches than the buffer. So its numbers are larger than the wanted one, which is
older than the buffer, and no reader takes them for batches that it has seen.

Threads: `publish` and `publish_snapshot` never block. The publisher's thread owns both sockets; it never
waits for a subscriber, so its queue stays short. The tree belongs to its owner's thread: when a peer needs a
snapshot, `snapshot_wanted` becomes true, `on_snapshot_wanted` is called on the publisher's thread, and the
owner calls `publish_snapshot`. Peers that wait share one. The publisher's thread encodes it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import zmq

from common.errors import ConfigError
from common.quiet_log import QuietLog
from kvcache.config import KVEventsConfig
from kvcache.snapshot import TreeSnapshot
from wire.binding import bind_socket
from wire.events import AnyEvent, encode_batch
from wire.security import Curve
from wire.zap import ZapHandler, end_context

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_WAIT_FOR_SNAPSHOT_S = 30.0  # a connected peer has asked again by then
_WAITING_PEERS = 1000
_ROUND_MS = 250
_LARGEST_REQUEST = 1024  # bytes; a request has one frame of 8


class _Batch(NamedTuple):
    sequence: int
    payload: bytes

    def frames(self, topic: bytes) -> list[bytes]:
        return [topic, self.sequence.to_bytes(8, "big"), self.payload]


class _Queued(NamedTuple):
    at: float  # of the Unix clock
    what: list[AnyEvent] | TreeSnapshot


class EventPublisher:
    """Publishes batches. Close it, or use it as a context manager."""

    def __init__(
        self,
        config: KVEventsConfig,
        curve: Curve | None = None,
        on_snapshot_wanted: Callable[[], None] | None = None,
    ) -> None:
        """Bind both sockets on `config.interface`; with `curve`, only members of the cluster can connect.

        Without `on_snapshot_wanted` there are no snapshots: a replay from too old a start begins later.
        Raises ConfigError when no port can be had.
        """
        self._topic = config.topic.encode()
        self._quiet = QuietLog(log)
        self._kept: deque[_Batch] = deque(maxlen=config.buffer_batches)
        self._buffer_batches = config.buffer_batches
        self._next = 0  # sequence number of the next batch
        self._queue: deque[_Queued] = deque()
        self._on_snapshot_wanted = on_snapshot_wanted
        self._wanted = False  # set on the publisher's thread, reset by publish_snapshot
        self._waiting: dict[bytes, float] = {}  # peers that need a snapshot, and until when
        self.snapshots = 0
        self._context = zmq.Context()
        self._zap = None if curve is None else ZapHandler(self._context, curve.is_reader)
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
        self._pub.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)  # of subscriptions
        # A whole replay must fit a peer's queue: messages beyond the mark are dropped, also the end marker.
        self._replay.setsockopt(zmq.SNDHWM, 2 * config.buffer_batches + 2)
        self._pub.setsockopt(zmq.SNDHWM, config.buffer_batches)
        try:
            self.address = self._bind(self._pub, config, curve)
            self.replay_address = self._bind(self._replay, config, curve)
        except ConfigError:
            end_context(self._context, self._zap, linger_ms=0)
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self.beats = 0  # rounds of the thread and batches that it sent: several a second
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], config: KVEventsConfig, curve: Curve | None) -> str:
        socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            curve.serve(socket)
        endpoint = bind_socket(socket, config.interface, config.ports)
        return endpoint if curve is None else curve.address(endpoint)

    @property
    def running(self) -> bool:
        """Whether the threads live."""
        return self._thread.is_alive() and (self._zap is None or self._zap.running)

    @property
    def snapshot_wanted(self) -> bool:
        """A peer waits for `publish_snapshot`."""
        return self._wanted

    def publish(self, events: list[AnyEvent]) -> None:
        """Send `events` as one batch, stamped with the time of this call. An empty list is no batch."""
        if events:
            self._put(events)

    def publish_snapshot(self, snapshot: TreeSnapshot) -> None:
        """Send the waiting peers all that the tree holds. The snapshot must be of the tree after everything
        published so far, and before everything published later: call it from where `publish` is called."""
        self._wanted = False
        self._put(snapshot)

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

    def _put(self, what: list[AnyEvent] | TreeSnapshot) -> None:
        assert not self._closing, "the publisher is closed"
        self._queue.append(_Queued(time.time(), what))
        os.eventfd_write(self._wake, 1)

    # -- the publisher's thread --------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._closing:
            self.beats += 1
            ready = dict(poller.poll(_ROUND_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._flush()
            if self._replay in ready:
                self._answer()
        self._flush()

    def _flush(self) -> None:
        while self._queue:
            at, what = self._queue.popleft()
            if isinstance(what, TreeSnapshot):
                self._send_snapshot(at, what)
                continue
            self.beats += 1
            batch = _Batch(self._next, encode_batch(at, what))
            self._kept.append(batch)
            self._pub.send_multipart(batch.frames(self._topic))
            self._next += 1

    def _send_snapshot(self, at: float, snapshot: TreeSnapshot) -> None:
        """Nothing has been published since the snapshot was taken: later batches are behind it in the
        queue."""
        if not self._waiting:
            return
        self.snapshots += 1
        payloads = []
        for events in snapshot.batches(self._buffer_batches):
            self.beats += 1
            payloads.append(encode_batch(at, events))
        first = self._next - len(payloads)
        batches = [_Batch(first + i, payload) for i, payload in enumerate(payloads)]
        now = time.monotonic()
        for peer, until in self._waiting.items():
            if now < until:
                self._reply(peer, batches)
        self._waiting.clear()

    def _answer(self) -> None:
        """Answer one replay request. A malformed one is logged and gets no answer."""
        peer, *request = self._replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            self._quiet.warning("kv events: a replay request of %d frames is not ['', number]", len(request))
            return
        oldest = self._next - len(self._kept)
        missing = int.from_bytes(request[1], "big") - oldest  # batches to leave out; < 0: not kept any more
        if missing < 0 and self._on_snapshot_wanted is not None:
            self._wait_for_snapshot(peer, self._on_snapshot_wanted)
        else:
            start = min(max(0, missing), len(self._kept))
            self._reply(peer, itertools.islice(self._kept, start, None))

    def _wait_for_snapshot(self, peer: bytes, tell_owner: Callable[[], None]) -> None:
        now = time.monotonic()
        self._waiting = {name: until for name, until in self._waiting.items() if now < until}
        if len(self._waiting) >= _WAITING_PEERS:
            log.warning("kv events: %d peers wait for a snapshot; one more is not answered", _WAITING_PEERS)
            return
        self._waiting[peer] = now + _WAIT_FOR_SNAPSHOT_S
        self._wanted = True
        tell_owner()

    def _reply(self, peer: bytes, batches: Iterable[_Batch]) -> None:
        for batch in batches:
            self.beats += 1
            self._replay.send_multipart([peer, b"", *batch.frames(self._topic)])
        self._replay.send_multipart([peer, b"", b"", _END, b""])
