"""The publishing side of bench.index: a process with a PUB and a replay socket per worker.

Frames are those of kvcache/publisher.py. Batches are encoded in advance, so that only the receiver is
measured. The sockets are XPUB, which is PUB on the wire and reports new subscribers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from bench.index_load import PAGE, Form, Load, Shape
from wire.records import GroupLayout, PageHashes, Role, WorkerLoad, WorkerRecord

TIMEOUT_S = 60.0
_END = (-1).to_bytes(8, "big", signed=True)
_TICK_S = 0.002


class _Worker:
    """The sockets of one worker, which numbers its batches from 0."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.pub, self.replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._number = 0
        self._kept: deque[bytes] = deque(maxlen=10_000)
        for socket in (self.pub, self.replay):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind("tcp://127.0.0.1:*")
        self.addresses = tuple(
            socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self.pub, self.replay)
        )

    def send(self, payload: bytes) -> None:
        """Publish a batch under the next number."""
        self.pub.send_multipart(self._frames(self._number, payload))
        self._kept.append(payload)
        self._number += 1

    def answer(self) -> None:
        """Answer the replay requests that have come."""
        while self.replay.poll(0):
            peer, _, start = self.replay.recv_multipart()
            first = self._number - len(self._kept)
            skipped = max(0, int.from_bytes(start, "big") - first)
            for number, payload in enumerate(islice(self._kept, skipped, None), first + skipped):
                self.replay.send_multipart([peer, b"", *self._frames(number, payload)])
            self.replay.send_multipart([peer, b"", b"", _END, b""])

    @staticmethod
    def _frames(number: int, payload: bytes) -> list[bytes]:
        return [b"kv-events", number.to_bytes(8, "big"), payload]


class Publisher:
    """Runs in the publishing process. The measuring process may call every public method."""

    def __init__(self, shape: Shape) -> None:
        self._load = Load(shape)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self._workers: list[_Worker] = []
        self._removals = [self._load.removal(sequence) for sequence in range(shape.sequences)]

    def prepare(self, form: Form) -> None:
        """Encode every batch."""
        for insertion in self._load.insertions():
            self._load.payload(insertion.sequence, insertion.start, form)

    def open(self) -> list[tuple[str, ...]]:
        """Open new sockets. Returns the (events, replay) addresses of each worker."""
        self._workers = [_Worker(self._context) for _ in range(self._load.shape.workers)]
        return [worker.addresses for worker in self._workers]

    def wait_subscribed(self) -> None:
        """Wait until every worker has a subscriber."""
        for worker in self._workers:
            assert worker.pub.poll(int(TIMEOUT_S * 1000)), "nobody subscribes"
            worker.pub.recv()

    def send(self, form: Form) -> None:
        """Publish all insertions."""
        for worker, sequence, start in self._load.insertions():
            self._workers[worker].answer()
            self._workers[worker].send(self._load.payload(sequence, start, form))

    def churn(self, connection: Connection, blocks_s: float) -> int:
        """Evict and insert again, in equal parts, at this rate until the other process sends something.

        Returns the number of blocks.
        """
        shape = self._load.shape
        random = np.random.default_rng(6)
        step = shape.pages - shape.shared
        started, sent = time.perf_counter(), 0
        while not connection.poll(_TICK_S):
            self._answer()
            while sent < (time.perf_counter() - started) * blocks_s:
                at = int(random.integers(shape.workers))
                sequence = int(self._load.held[at, random.integers(shape.held)])
                self._workers[at].send(self._removals[sequence])
                self._workers[at].send(self._load.payload(sequence, shape.shared, Form.NODE))
                sent += 2 * step
        connection.recv()
        return sent

    def _answer(self) -> None:
        for worker in self._workers:
            worker.answer()

    def close(self) -> None:
        """Close the sockets."""
        for worker in self._workers:
            worker.pub.close(0)
            worker.replay.close(0)
        self._workers = []


class Remote:
    """Calls the publisher from the measuring process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and wait for its result."""
        self.start(method, *arguments)
        return self.result()

    def start(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting."""
        self._connection.send((method, arguments))

    def result(self) -> Any:
        """Wait for the result of `start`."""
        assert self._connection.poll(TIMEOUT_S), "the publisher does not answer"
        return self._connection.recv()

    def open(self, page_hashes: PageHashes = "baton") -> list[WorkerRecord]:
        """Open new workers. Call `wait_subscribed` when they are followed."""
        addresses = self.call("open")
        return [_record(at, events, replay, page_hashes) for at, (events, replay) in enumerate(addresses)]

    def stop_churn(self) -> int:
        """End the churn that `start("churn", ...)` began. Returns the number of blocks."""
        self._connection.send(None)
        blocks: int = self.result()
        return blocks


@contextmanager
def publisher(shape: Shape, cores: set[int]) -> Iterator[Remote]:
    """Run a publishing process on these cores."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there, shape, cores), daemon=True)
    process.start()
    try:
        assert here.poll(TIMEOUT_S), "the publisher does not start"
        here.recv()
        yield Remote(here)
    finally:
        here.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()


def _serve(connection: Connection, shape: Shape, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    served = Publisher(shape)
    connection.send("ready")
    while True:
        while not connection.poll(0.05):
            served._answer()
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if method == "churn":
            connection.send(served.churn(connection, *arguments))
        else:
            connection.send(getattr(served, method)(*arguments))


def _record(at: int, events: str, replay: str, page_hashes: PageHashes) -> WorkerRecord:
    """Half of the workers prefill, half decode; eight share a host; no two are equally busy."""
    load = WorkerLoad(
        queued_prefill_tokens=100 * at, running_requests=at % 7, free_tokens=1 << 21,
        headroom_tokens=1 << 20, headroom_rows=64, prefill_tokens_per_s=20_000.0, decode_step_s=0.02,
    )  # fmt: skip
    return WorkerRecord(
        id=f"w{at}", incarnation=1, role=Role.PREFILL if at % 2 == 0 else Role.DECODE, mailbox="",
        events=events, replay=replay, model="bench", fingerprint="",
        groups=(GroupLayout("full", "full", (1,), "uint8", "plain", PAGE, 1),), max_context_tokens=1 << 20,
        total_tokens=1 << 22, max_running_requests=256, pid=0, host=f"h{at // 8}", transfer_backends=(),
        load=load, page_hashes=page_hashes,
    )  # fmt: skip
