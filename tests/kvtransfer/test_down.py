"""A receiver that is stopped holds no sender for longer than it takes to find that out; others go on."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from common.errors import TransferError
from common.host import host_identity
from common.ports import Ports
from kvtransfer.pages import PageWrite
from kvtransfer.select import PoolSender, open_receiver, open_sender
from kvtransfer.sender import KVSender, SenderThreads, Sent
from kvtransfer.transport import Bounds
from tests.harness.fork import FORKSERVER
from tests.kvtransfer.peers import gpu_for, pool, receiving
from wire.messages.transfer import GroupTarget, TransferEndpoint

PAGES, SIZE = 64, 1 << 20  # more than the kernel's buffers take
ALL = np.arange(1, PAGES)
LONG = Bounds(connect_s=60.0, silence_s=60.0, write_s=120.0)  # no bound helps
PATIENCE_S = 30.0
BACKENDS = ["cuda_ipc", "shm", "tcp"]


class Receiver:
    """A decode worker's pool in a process of its own, with room 1 open, epochs 0 to 9."""

    def __init__(self, backend: str) -> None:
        self._conn, theirs = FORKSERVER.Pipe()
        self.process = FORKSERVER.Process(target=_receiver_main, args=(theirs, backend), daemon=True)
        self.process.start()
        theirs.close()
        self.endpoint: TransferEndpoint = self._answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close_room(self, epoch: int) -> bool:
        """Whether the fence passes."""
        self._conn.send(epoch)
        return bool(self._answer())

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._conn.close()

    def _answer(self) -> Any:
        assert self._conn.poll(PATIENCE_S), "the receiver does not answer"
        return self._conn.recv()


def _receiver_main(conn: Connection, backend: str) -> None:
    with receiving(backend, PAGES, SIZE, LONG) as (receiver, _):
        for epoch in range(10):
            receiver.open(1, epoch, {"full": ALL})
        conn.send(receiver.endpoints[0])
        while True:
            try:
                epoch = conn.recv()
            except EOFError:
                return
            conn.send(receiver.close_room(1, epoch).wait(PATIENCE_S))


@contextmanager
def receivers(backend: str, count: int) -> Iterator[list[Receiver]]:
    made: list[Receiver] = []
    try:
        made += [Receiver(backend) for _ in range(count)]
        yield made
    finally:
        for one in made:
            one.close()


class Writes:
    """Writes in threads, and how they ended: "" or the error."""

    def __init__(self, sender: PoolSender) -> None:
        self._sender = sender
        self.ended: queue.Queue[str] = queue.Queue()

    def begin(self, endpoint: TransferEndpoint, epoch: int) -> None:
        threading.Thread(target=self._write, args=(endpoint, epoch), daemon=True).start()

    def _write(self, endpoint: TransferEndpoint, epoch: int) -> None:
        try:
            self._sender.write(endpoint, PageWrite(1, epoch, "full", ALL, ALL))
            self.ended.put("")
        except TransferError as error:
            self.ended.put(str(error))


@pytest.mark.parametrize("met_before", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_to_a_receiver_that_is_down_end_at_once_and_its_grants_when_it_goes_on(
    backend: str, met_before: bool
) -> None:
    with receivers(backend, 1) as (there,):
        sender = open_sender(
            {"full": pool(PAGES, SIZE, 1, memory=gpu_for(backend))}, host_identity(), backend, bounds=LONG
        )
        writes = Writes(sender)
        if met_before:
            writes.begin(there.endpoint, 9)
            assert writes.ended.get(timeout=PATIENCE_S) == ""
        there.signal(signal.SIGSTOP)
        for epoch in (0, 1, 2):
            writes.begin(there.endpoint, epoch)
        with pytest.raises(queue.Empty):
            writes.ended.get(timeout=0.5)
        sender.suspend(there.endpoint)
        for _ in range(3):
            assert writes.ended.get(timeout=PATIENCE_S) != ""
        began = time.monotonic()
        with pytest.raises(TransferError, match="down"):
            sender.write(there.endpoint, PageWrite(1, 3, "full", ALL, ALL))
        assert time.monotonic() - began < PATIENCE_S
        there.signal(signal.SIGCONT)
        for epoch in (0, 1, 2):
            assert there.close_room(epoch), "the grant of a write that was given up ends without its process"
        sender.resume(there.endpoint)
        writes.begin(there.endpoint, 4)
        assert writes.ended.get(timeout=PATIENCE_S) == ""
        sender.close()


def test_the_next_receiver_at_the_address_of_one_that_is_down_is_up() -> None:
    write = PageWrite(1, 0, "full", ALL, ALL)
    sender = open_sender({"full": pool(PAGES, 64, 1)}, host_identity(), "tcp")
    regions = {"full": pool(PAGES, 64)}
    before = open_receiver(regions, "tcp")
    (there,) = before.endpoints
    before.open(1, 0, {"full": ALL})
    sender.write(there, write)
    sender.suspend(there)
    before.close()
    after = open_receiver(regions, "tcp", ports=Ports(there.address.rpartition(":")[2]))
    assert after.endpoints[0].address == there.address
    after.open(1, 0, {"full": ALL})
    assert sender.write(after.endpoints[0], write) == len(ALL) * 64
    with pytest.raises(TransferError, match="down"):
        sender.write(there, write)
    sender.close()
    after.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_receiver_does_not_hold_all_threads(backend: str) -> None:
    with receivers(backend, 2) as (stopped, other):
        sender = open_sender(
            {"full": pool(PAGES, SIZE, 1, memory=gpu_for(backend))}, host_identity(), backend, bounds=LONG
        )
        sent: queue.Queue[Sent] = queue.Queue()
        regions = {"full": pool(PAGES, SIZE, 1, memory=gpu_for(backend))}
        threads = SenderThreads(sender, regions, sent.put)
        stopped.signal(signal.SIGSTOP)
        target = {"full": GroupTarget(0, ALL.tolist())}
        for epoch in range(5):  # more than there are threads
            room = KVSender(threads, 1, epoch, 1, stopped.endpoint, target)
            room.send({"full": ALL}, len(ALL), last=True)
        for epoch in range(5):
            room = KVSender(threads, 1, epoch, 1, other.endpoint, target)
            room.send({"full": ALL}, len(ALL), last=True)
        for _ in range(5):
            assert sent.get(timeout=PATIENCE_S).error is None
        sender.suspend(stopped.endpoint)
        failed = [sent.get(timeout=PATIENCE_S) for _ in range(5)]
        assert all(one.error for one in failed)
        assert sorted(one.epoch for one in failed) == [0, 1, 2, 3, 4]
        threads.close()
        sender.close()
