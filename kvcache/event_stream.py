"""EventStream: the two sockets on which batches of KV events are published and replayed, and their numbers.

A worker has one for public pages and one for private ones (publisher.py). All of it runs on the publisher's
thread, which never waits for a subscriber.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import zmq

from common.quiet_log import QuietLog
from kvcache.config import KVEventsConfig
from kvcache.snapshot import TreeSnapshot
from wire.binding import bind_socket
from wire.events import AnyEvent, encode_batch
from wire.security import Curve

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_WAIT_FOR_SNAPSHOT_S = 30.0  # a connected peer has asked again by then
_WAITING_PEERS = 1000
_LARGEST_REQUEST = 1024  # bytes; a request has one frame of 8


class _Batch(NamedTuple):
    sequence: int
    payload: bytes

    def frames(self, topic: bytes) -> list[bytes]:
        return [topic, self.sequence.to_bytes(8, "big"), self.payload]


class EventStream:
    """Batches with numbers of their own. The context closes the sockets."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: KVEventsConfig,
        curve: Curve | None,
        on_beat: Callable[[], None],
    ) -> None:
        """Bind both sockets. `on_beat` is called for each message sent. Raises ConfigError when no port can
        be had."""
        self._topic = config.topic.encode()
        self._quiet = QuietLog(log)
        self._config = config
        self._kept: deque[_Batch] = deque()
        self._kept_bytes = 0
        self._next = 0  # sequence number of the next batch
        self._waiting: dict[bytes, float] = {}  # peers that need a snapshot, and until when
        self._on_beat = on_beat
        self.snapshots = 0
        self._pub = context.socket(zmq.PUB)
        self.replay = context.socket(zmq.ROUTER)
        self.replay.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
        self._pub.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)  # of subscriptions
        # A whole replay must fit a peer's queue: messages beyond the mark are dropped, also the end marker.
        self.replay.setsockopt(zmq.SNDHWM, 2 * config.buffer_batches + 2)
        self._pub.setsockopt(zmq.SNDHWM, config.buffer_batches)
        self.address = _bind(self._pub, config, curve)
        self.replay_address = _bind(self.replay, config, curve)

    def send(self, at: float, events: Sequence[AnyEvent]) -> None:
        """Publish a batch, stamped with the time `at`."""
        self._on_beat()
        batch = _Batch(self._next, encode_batch(at, events))
        self._keep(batch)
        self._pub.send_multipart(batch.frames(self._topic))
        self._next += 1

    def _keep(self, batch: _Batch) -> None:
        """For replay, in place of the oldest ones; the last one is kept however large it is, because readers
        ask for it. The store of a prompt of 100,000 tokens has some 400 kB: a number alone is no bound."""
        self._kept.append(batch)
        self._kept_bytes += len(batch.payload)
        most, most_bytes = self._config.buffer_batches, self._config.buffer_bytes
        while len(self._kept) > most or (len(self._kept) > 1 and self._kept_bytes > most_bytes):
            self._kept_bytes -= len(self._kept.popleft().payload)

    def send_snapshot(self, at: float, snapshot: TreeSnapshot) -> None:
        """Answer the peers that wait for one. Nothing may have been published since it was taken."""
        if not self._waiting:
            return
        self.snapshots += 1
        payloads = []
        for events in snapshot.batches(len(self._kept)):
            self._on_beat()
            payloads.append(encode_batch(at, events))
        first = self._next - len(payloads)
        batches = [_Batch(first + i, payload) for i, payload in enumerate(payloads)]
        now = time.monotonic()
        for peer, until in self._waiting.items():
            if now < until:
                self._reply(peer, batches)
        self._waiting.clear()

    def answer(self, gives_snapshots: bool) -> bool:
        """Answer one replay request, or return True: its peer needs a snapshot, and waits for one now. A
        malformed request is logged and gets no answer."""
        peer, *request = self.replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            self._quiet.warning("kv events: a replay request of %d frames is not ['', number]", len(request))
            return False
        oldest = self._next - len(self._kept)
        missing = int.from_bytes(request[1], "big") - oldest  # batches to leave out; < 0: not kept any more
        if missing < 0 and gives_snapshots:
            return self._wait_for_snapshot(peer)
        start = min(max(0, missing), len(self._kept))
        self._reply(peer, itertools.islice(self._kept, start, None))
        return False

    def _wait_for_snapshot(self, peer: bytes) -> bool:
        now = time.monotonic()
        self._waiting = {name: until for name, until in self._waiting.items() if now < until}
        if len(self._waiting) >= _WAITING_PEERS:
            log.warning("kv events: %d peers wait for a snapshot; one more is not answered", _WAITING_PEERS)
            return False
        self._waiting[peer] = now + _WAIT_FOR_SNAPSHOT_S
        return True

    def _reply(self, peer: bytes, batches: Iterable[_Batch]) -> None:
        for batch in batches:
            self._on_beat()
            self.replay.send_multipart([peer, b"", *batch.frames(self._topic)])
        self.replay.send_multipart([peer, b"", b"", _END, b""])


def _bind(socket: zmq.Socket[bytes], config: KVEventsConfig, curve: Curve | None) -> str:
    socket.setsockopt(zmq.LINGER, 0)
    if curve is not None:
        curve.serve(socket)
    endpoint = bind_socket(socket, config.interface, config.ports)
    return endpoint if curve is None else curve.address(endpoint)
