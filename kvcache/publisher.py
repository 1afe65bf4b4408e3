"""EventPublisher: KV events over ZeroMQ, with a replay socket, in the frames vLLM and SGLang use.

PUB frames: topic, 8-byte big-endian sequence number from 0, batch. A subscriber that missed some asks the
replay ROUTER with `["", first wanted number]` and gets `["", topic, number, batch]` each, then the end marker
`["", "", -1, ""]`. The last `buffer_batches` are kept; a start that is too old begins with the oldest.

Threads: `publish` may be called from any thread and never blocks. One thread of ours owns both sockets; it
never waits for a subscriber, so what is queued for it stays short.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import NamedTuple

import zmq

from kvcache.config import KVEventsConfig
from wire.events import AnyEvent, encode_batch
from wire.security import Curve

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)


class _Batch(NamedTuple):
    sequence: int
    payload: bytes

    def frames(self, topic: bytes) -> list[bytes]:
        return [topic, self.sequence.to_bytes(8, "big"), self.payload]


class EventPublisher:
    """Publishes batches on fresh ports. Close it, or use it as a context manager."""

    def __init__(self, config: KVEventsConfig, curve: Curve | None = None) -> None:
        """Bind both sockets on `config.interface`; with `curve`, members of the cluster only."""
        self._topic = config.topic.encode()
        self._kept: deque[_Batch] = deque(maxlen=config.buffer_batches)
        self._queue: deque[tuple[float, list[AnyEvent]]] = deque()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        # A whole replay must fit a peer's queue: what exceeds the mark is dropped, end marker included.
        self._replay.setsockopt(zmq.SNDHWM, 2 * config.buffer_batches + 2)
        self._pub.setsockopt(zmq.SNDHWM, config.buffer_batches)
        self.address = self._bind(self._pub, config.interface, curve)
        self.replay_address = self._bind(self._replay, config.interface, curve)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], interface: str, curve: Curve | None) -> str:
        socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            curve.serve(socket)
        socket.bind(f"tcp://{interface}:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def publish(self, events: list[AnyEvent]) -> None:
        """Send `events` as one batch, stamped with the time of this call. An empty list is no batch."""
        assert not self._closing, "the publisher is closed"
        if events:
            self._queue.append((time.time(), events))
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued, stop the thread and free the ports. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5.0)
        self._context.destroy(linger=500)
        os.close(self._wake)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        sequence = 0
        while not self._closing:
            ready = dict(poller.poll(1000))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            sequence = self._flush(sequence)
            if self._replay in ready:
                self._answer()
        self._flush(sequence)

    def _flush(self, sequence: int) -> int:
        while self._queue:
            batch = _Batch(sequence, encode_batch(*self._queue.popleft()))
            self._kept.append(batch)
            self._pub.send_multipart(batch.frames(self._topic))
            sequence += 1
        return sequence

    def _answer(self) -> None:
        """Answer one replay request. One that is malformed is named and gets nothing."""
        peer, *request = self._replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            log.warning("kv events: a replay request of %d frames is not ['', number]", len(request))
            return
        start = int.from_bytes(request[1], "big")
        for batch in self._kept:
            if batch.sequence >= start:
                self._replay.send_multipart([peer, b"", *batch.frames(self._topic)])
        self._replay.send_multipart([peer, b"", b"", _END, b""])
