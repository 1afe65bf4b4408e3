"""Transfer: the bytes per second of each backend, and of the plainest way to move the same bytes.

    python -m bench.transfer [--json] [--rounds N]

One process sends, another receives. Shape M: 512 pages of 1.75 MiB (28 layers x K, V x 8 heads x 16 tokens x
128 x bf16), source and target in random order, all memory touched, one round to warm up, the CRC-32 of every
page compared at the receiver. Then the small pages of the demo model (32 KiB). The two sides of a ratio are
timed alternately, by the sender: from the call until the receiver has confirmed.

- shm_vs_memcpy: against memcpy of the same pages, in the same order, within one process's private memory.
- tcp_vs_socket: against sendall / recv_into of one contiguous block over one blocking loopback connection.
- tcp_authenticated_vs_plain: tcp with AES-GCM, as in a cluster with a secret, against tcp without.
- sampled_checksums_share, all_checksums_share: the time of checksums on both sides against shm's transfer.
- mooncake_vs_contiguous: against one Mooncake write of one contiguous block of the same size.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.common import alternate, argument_parser, medians, print_result
from common.host import host_identity
from kvcache.buffers import allocate_private, allocate_shared
from kvcache.page_runs import PageIds, coalesce, copy_each
from kvtransfer.checksum import checksums, samples
from kvtransfer.mooncake_engine import MooncakeEngine
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import GroupRegion
from kvtransfer.select import open_receiver, open_sender
from wire.checksums import ChecksumMode
from wire.messages.transfer import TransferEndpoint

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Shape:
    """How many pages of how many bytes are moved."""

    pages: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of one round."""
        return self.pages * self.page_bytes


SHAPE_M = Shape(512, 28 * 2 * 8 * 16 * 128 * 2)
DEMO = Shape(4096, 4 * 2 * 4 * 16 * 32 * 2)


class SendingProcess:
    """The sending process. The receiving process calls its public methods by name and gets their time."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pool = GroupRegion(allocate_private(shape.nbytes).tensor.view(shape.pages, shape.page_bytes))
        rows = np.random.default_rng(1).integers(0, 256, (shape.pages, 64), np.uint8)
        for page, row in enumerate(rows):  # every page touched, and different from every other
            self._pool.tensor.numpy()[page] = np.resize(row, shape.page_bytes)
        self._regions = {"full": self._pool}
        self._sender = open_sender(self._regions, host_identity(), "auto")
        self._mooncake = open_sender(self._regions, host_identity(), "mooncake")
        self._engine = MooncakeEngine(HOST, 10.0)
        self._engine.register(self._pool.ptr, self._pool.nbytes)
        self._copy = allocate_private(shape.nbytes)

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> None:
        sender = self._mooncake if endpoint.backend == "mooncake" else self._sender
        sender.write(endpoint, write)

    def memcpy(self, src: PageIds, dst: PageIds) -> None:
        copy_each(self._pool.ptr, self._copy.tensor.data_ptr(), coalesce(src, dst), self._shape.page_bytes)

    def stream(self, address: tuple[str, int]) -> None:
        with socket.create_connection(address) as sock:
            sock.sendall(self._pool.tensor.view(-1).numpy().data)
            sock.recv(1)  # the receiver has read everything

    def contiguous(self, session: str, ptr: int) -> None:
        self._engine.write(session, [self._pool.ptr], [ptr], [self._pool.nbytes])

    def checksums(self, mode: ChecksumMode, room: int, pages: PageIds) -> list[int]:
        return checksums(self._pool, pages, samples(mode, room, 0, len(pages), self._shape.page_bytes))


def _sending_main(conn: Connection, shape: Shape) -> None:
    answer_calls(conn, SendingProcess(shape))


def answer_calls(conn: Connection, sending: object) -> None:
    """Call the methods of `sending` that ReceivingProcess.call names, until it hangs up."""
    while True:
        try:
            name, arguments = conn.recv()
        except EOFError:
            return
        started = time.perf_counter()
        answer = getattr(sending, name)(*arguments)
        conn.send((time.perf_counter() - started, answer))


class ReceivingProcess:
    """The receiving process; it directs the sending one."""

    def __init__(self, shape: Shape, conn: Connection, pool: GroupRegion) -> None:
        self.shape = shape
        self.pool = pool
        self._conn = conn
        self._rounds = 0
        self._rng = np.random.default_rng(2)

    def call(self, name: str, *arguments: object) -> tuple[float, Any]:
        """(seconds, answer) of a method of the sending process."""
        self._conn.send((name, arguments))
        if not self._conn.poll(TIMEOUT_S):
            raise TimeoutError(f"{name} does not end")
        answer: tuple[float, Any] = self._conn.recv()
        return answer

    def order(self) -> tuple[PageIds, PageIds]:
        """A fresh random pairing of all pages."""
        return self._rng.permutation(self.shape.pages), self._rng.permutation(self.shape.pages)

    def transfer(self, receiver: PoolReceiver, src: PageIds, dst: PageIds, on_host: bool = False) -> float:
        """Seconds of one room's write. `on_host`: the source pages are those of a host tier."""
        self._rounds += 1
        receiver.open(self._rounds, 0, {"full": dst})
        write = PageWrite(self._rounds, 0, "full", src, dst, on_host)
        seconds, _ = self.call("write", receiver.endpoints[0], write)
        landed = receiver.landed(self._rounds, 0)
        if landed.missing or not receiver.close_room(self._rounds, 0).passed:
            raise RuntimeError(f"{landed.missing} pages are missing")
        return seconds

    def verified_transfer(self, receiver: PoolReceiver) -> float:
        """Seconds of one room's write into a pool of zeros, compared afterwards."""
        src, dst = self.order()
        self.pool.tensor.fill_(0)
        took = self.transfer(receiver, src, dst)
        self.verify(src, dst)
        return took

    def verify(self, src: PageIds, dst: PageIds) -> None:
        """Compare every page's checksum with the sender's."""
        self.compare(ChecksumMode.ALL, src, dst)

    def compare(self, mode: ChecksumMode, src: PageIds, dst: PageIds) -> float:
        """Compare checksums with the sender's, as a hand-off does. Returns the seconds of both sides."""
        seconds, theirs = self.call("checksums", mode, self._rounds, src)
        started = time.perf_counter()
        wanted = samples(mode, self._rounds, 0, len(dst), self.shape.page_bytes)
        if theirs != checksums(self.pool, dst, wanted):
            raise RuntimeError("a page differs from what was sent")
        return seconds + time.perf_counter() - started

    def stream(self) -> float:
        """Seconds of the plain socket."""
        with socket.create_server((HOST, 0)) as server:
            thread = threading.Thread(target=self._drain, args=(server,))
            thread.start()
            seconds, _ = self.call("stream", server.getsockname())
            thread.join(TIMEOUT_S)
        return seconds

    def _drain(self, server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            rest = self.pool.tensor.view(-1).numpy().data
            while rest:
                rest = rest[sock.recv_into(rest) :]
            sock.sendall(b"x")


def _checked(receiving: ReceivingProcess, rounds: int) -> dict[str, float]:
    """By mode, the time of the checksums on both sides as a share of the time of a transfer by shm."""
    receiver = open_receiver({"full": receiving.pool}, "shm")
    shares: dict[str, list[float]] = {mode: [] for mode in ChecksumMode if mode.is_on}
    try:
        for _ in range(rounds + 1):
            src, dst = receiving.order()
            transfer = receiving.transfer(receiver, src, dst)
            for mode, found in shares.items():
                found.append(receiving.compare(ChecksumMode(mode), src, dst) / transfer)
    finally:
        receiver.close()
    return {mode: statistics.median(found[1:]) for mode, found in shares.items()}


@contextmanager
def _receiving(shape: Shape) -> Iterator[ReceivingProcess]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_sending_main, args=(theirs, shape), daemon=True)
    process.start()
    theirs.close()
    try:
        buffer = allocate_shared(shape.nbytes)
        with buffer:
            tensor = buffer.tensor.view(shape.pages, shape.page_bytes)
            tensor.fill_(1)
            yield ReceivingProcess(shape, mine, GroupRegion(tensor, fd=buffer.fd))
    finally:
        mine.close()
        process.join(10)
        process.kill()


def _compare(
    receiving: ReceivingProcess, backend: str, plain: Callable[[PageIds, PageIds], float], rounds: int
) -> list[float]:
    """GB/s of the backend and of the plain way: medians of alternating rounds after one to warm up."""
    receiver = open_receiver({"full": receiving.pool}, backend)
    try:
        return _rates(
            receiving,
            lambda: receiving.verified_transfer(receiver),
            lambda: plain(*receiving.order()),
            rounds,
        )
    finally:
        receiver.close()


def _compare_authenticated(receiving: ReceivingProcess, rounds: int) -> list[float]:
    """GB/s of tcp with AES-GCM and without."""
    encrypted = open_receiver({"full": receiving.pool}, "tcp", encrypted=True)
    plain = open_receiver({"full": receiving.pool}, "tcp")
    try:
        return _rates(
            receiving,
            lambda: receiving.verified_transfer(encrypted),
            lambda: receiving.verified_transfer(plain),
            rounds,
        )
    finally:
        plain.close()
        encrypted.close()


def _rates(
    receiving: ReceivingProcess, ours: Callable[[], float], plain: Callable[[], float], rounds: int
) -> list[float]:
    """GB/s of both: medians of alternating rounds after one to warm up."""
    sides = {"plain": plain, "ours": ours}
    alternate(sides, 1)
    took = medians(alternate(sides, rounds))
    return [receiving.shape.nbytes / took[side] / 1e9 for side in ("ours", "plain")]


def measure(shape: Shape, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """backend -> [GB/s of ours, GB/s of the plain way]; and the share of the checksums of each mode."""
    with _receiving(shape) as receiving:
        rates = {
            "shm": _compare(receiving, "shm", lambda src, dst: receiving.call("memcpy", src, dst)[0], rounds),
            "tcp": _compare(receiving, "tcp", lambda _src, _dst: receiving.stream(), rounds),
            "tcp_authenticated": _compare_authenticated(receiving, rounds),
        }
        engine = MooncakeEngine(HOST, 10.0)
        engine.register(receiving.pool.ptr, receiving.pool.nbytes)
        target = (engine.session, receiving.pool.ptr)
        rates["mooncake"] = _compare(
            receiving, "mooncake", lambda _src, _dst: receiving.call("contiguous", *target)[0], rounds
        )
        engine.close()
        checked = _checked(receiving, rounds)
    return rates, checked


def main() -> None:
    """Measure both shapes and print the result."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    options = parser.parse_args()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    plain = {"shm": "memcpy", "tcp": "socket", "tcp_authenticated": "plain", "mooncake": "contiguous"}
    ratios: dict[str, float] = {}
    values: dict[str, float] = {}
    for prefix, shape in (("", SHAPE_M), ("demo_", DEMO)):
        rates, checked = measure(shape, options.rounds)
        for mode, share in checked.items():
            values[f"{prefix}{mode}_checksums_share"] = round(share, 5)
        for backend, (ours, theirs) in rates.items():
            against = plain[backend]
            values[f"{prefix}{backend}_gb_s"] = round(ours, 3)
            values[f"{prefix}{against}_gb_s"] = round(theirs, 3)
            where = values if prefix else ratios
            where[f"{prefix}{backend}_vs_{against}"] = round(ours / theirs, 3)
    print_result("transfer", ratios, values, options.json)


if __name__ == "__main__":
    main()
