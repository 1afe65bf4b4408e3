"""Pools with known bytes, and the sending side of a transfer in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from common.errors import TransferError
from common.host import host_identity
from kvcache.buffers import allocate_private, allocate_shared
from kvtransfer.pages import PageIds, PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import GroupRegion
from kvtransfer.rooms import RoomTable
from kvtransfer.select import open_receiver, open_sender
from kvtransfer.transport import Bounds
from tests.harness.fork import FORKSERVER
from tests.kvtransfer.stand_in_copies import StandInCopies
from wire.messages import TransferEndpoint

SHORT = Bounds(connect_s=2.0, silence_s=2.0, write_s=20.0)

Shapes = Mapping[str, tuple[int, int]]
"""Group -> (pages, bytes of a page)."""


def pool(num_pages: int, page_bytes: int, seed: int | None = None, staged: bool = False) -> GroupRegion:
    """A private pool: numbered random pages by seed, or zeros without a seed."""
    tensor = allocate_private(num_pages * page_bytes).tensor.view(num_pages, page_bytes)
    if seed is not None:
        page = np.random.default_rng(seed).integers(0, 256, page_bytes, np.uint8)
        pages = tensor.numpy()
        pages[:] = page  # random by the byte takes seconds for the large pools; numbered pages differ as well
        pages[:, :8] = np.arange(num_pages, dtype="<i8")[:, None].view(np.uint8)
    return GroupRegion(tensor, copies=StandInCopies(late=True) if staged else None)


def pools(shapes: Shapes, seed: int, staged: bool = False) -> dict[str, GroupRegion]:
    """A `pool` for every group, each with different bytes."""
    return {name: pool(*shape, seed + i, staged) for i, (name, shape) in enumerate(shapes.items())}


@contextmanager
def receiving_groups(
    backend: str, shapes: Shapes, bounds: Bounds = SHORT, staged: bool = False, encrypted: bool = False
) -> Iterator[tuple[PoolReceiver, dict[str, torch.Tensor]]]:
    """A decode worker's open pools and their bytes."""
    with ExitStack() as cleanup:
        regions = {}
        for name, (num_pages, page_bytes) in shapes.items():
            buffer = cleanup.enter_context(allocate_shared(num_pages * page_bytes))
            tensor = buffer.tensor.view(num_pages, page_bytes)
            copies = StandInCopies(late=True) if staged else None
            regions[name] = GroupRegion(tensor, buffer.fd, copies)
        receiver = open_receiver(regions, backend, bounds=bounds, encrypted=encrypted)
        cleanup.callback(receiver.close)
        yield receiver, {name: region.tensor for name, region in regions.items()}


@contextmanager
def receiving(
    backend: str,
    num_pages: int,
    page_bytes: int,
    bounds: Bounds = SHORT,
    staged: bool = False,
    encrypted: bool = False,
) -> Iterator[tuple[PoolReceiver, torch.Tensor]]:
    """A decode worker with one open pool, "full", and its bytes."""
    shapes = {"full": (num_pages, page_bytes)}
    with receiving_groups(backend, shapes, bounds, staged, encrypted) as (receiver, tensors):
        yield receiver, tensors["full"]


class SenderProcess:
    """A process with pools of random pages (by seed) that writes what it is told to."""

    def __init__(self, backend: str, shapes: Shapes, seed: int) -> None:
        self.pools = {name: region.tensor for name, region in pools(shapes, seed).items()}
        self._conn, theirs = FORKSERVER.Pipe()
        self.process: BaseProcess = FORKSERVER.Process(
            target=_sender_main, args=(theirs, backend, shapes, seed), daemon=True
        )
        self.process.start()
        theirs.close()

    def start(self, endpoint: TransferEndpoint, write: PageWrite, times: int = 1) -> None:
        """Begin to write, `times` over."""
        self._conn.send((endpoint, write, times))

    def outcome(self, timeout_s: float = 30.0) -> int:
        """Wait for what was started. Returns its bytes, or raises its TransferError."""
        assert self._conn.poll(timeout_s), "the sender does not answer"
        answer: Any = self._conn.recv()
        if isinstance(answer, str):
            raise TransferError(answer)
        assert isinstance(answer, int)
        return answer

    def write(self, endpoint: TransferEndpoint, write: PageWrite) -> int:
        """Write and wait."""
        self.start(endpoint, write)
        return self.outcome()

    def close(self) -> None:
        """End it, stopped or not."""
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self._conn.close()

    def __enter__(self) -> SenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sender_main(conn: Connection, backend: str, shapes: Shapes, seed: int) -> None:
    sender = open_sender(pools(shapes, seed), host_identity(), backend, bounds=SHORT)
    while True:
        try:
            endpoint, write, times = conn.recv()
        except EOFError:
            return
        try:
            conn.send(sum(sender.write(endpoint, write) for _ in range(times)))
        except TransferError as error:
            conn.send(str(error))


def permuted(rng: np.random.Generator, num_pages: int, count: int) -> PageIds:
    """`count` different pages, never the scratch page 0."""
    return rng.permutation(np.arange(1, num_pages))[:count].astype(np.int64)


def grants_out(table: RoomTable) -> int:
    """Writes that are granted and not over. The table keeps this to itself: only tests count them."""
    with table._lock:
        return sum(len(room.grants) for room in table._rooms.values())
