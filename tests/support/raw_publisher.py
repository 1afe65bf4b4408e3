"""A publisher of KV events written from the wire facts, as vLLM's is, and a proxy that loses messages."""

from __future__ import annotations

import random
import threading
from collections import deque

import zmq

from wire.events import AnyEvent, encode_batch


def bound(
    context: zmq.Context, kind: int, address: str = "tcp://127.0.0.1:*"
) -> tuple[zmq.Socket[bytes], str]:
    """A socket and where it listens."""
    socket = context.socket(kind)
    socket.bind(address)
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


class RawPublisher:
    """PUB and replay ROUTER. It can forget to send a batch, and knows no snapshots. While it is `deaf` it
    answers no request; `asked` counts them."""

    def __init__(
        self, keep: int = 1000, events: str = "tcp://127.0.0.1:*", replay: str = "tcp://127.0.0.1:*"
    ) -> None:
        self._context = zmq.Context()
        self.pub, self.events = bound(self._context, zmq.PUB, events)
        self._router, self.replay = bound(self._context, zmq.ROUTER, replay)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._number = 0
        self.deaf, self.asked = False, 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, *events: AnyEvent, lose: bool = False, raw: bytes | None = None) -> None:
        payload = raw if raw is not None else encode_batch(random.random(), list(events))
        self._kept.append((self._number, payload))
        if not lose:
            self.pub.send_multipart([b"kv-events", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def __enter__(self) -> RawPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._router.poll(20):
                continue
            identity, empty, start = self._router.recv_multipart()
            self.asked += 1
            if self.deaf:
                continue
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    frames = [identity, empty, b"kv-events", number.to_bytes(8, "big"), payload]
                    self._router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            self._router.send_multipart([identity, empty, b"", end, b""])


class LossyProxy:
    """Stands between a PUB socket and its subscribers, and loses a share of what passes: `loss`, which may be
    changed. Replays do not go through it."""

    def __init__(self, events: str, loss: float, seed: int) -> None:
        self._context = zmq.Context()
        self._rng, self.loss = random.Random(seed), loss
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.subscribe(b"")
        self._sub.connect(events)
        self._pub, self.address = bound(self._context, zmq.PUB)
        self.lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._sub.poll(20):
                continue
            frames = self._sub.recv_multipart()
            if self._rng.random() < self.loss:
                self.lost += 1
            else:
                self._pub.send_multipart(frames)
