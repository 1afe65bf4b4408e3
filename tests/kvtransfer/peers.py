"""Pools with known bytes, and the sending side of a transfer in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from common.errors import TransferError
from common.host import host_identity
from kvcache.buffers import PoolBuffer, allocate_private, allocate_shared
from kvcache.device_memory import DeviceMemory
from kvcache.page_runs import PageIds
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import GroupRegion, region_of
from kvtransfer.rooms import RoomTable
from kvtransfer.select import open_receiver, open_sender
from kvtransfer.transport import Bounds
from tests.harness.fork import FORKSERVER
from tests.kvtransfer.stand_in_copies import StandInCopies
from tests.support.cuda_stand_in import stand_in_memory
from wire.messages.transfer import TransferEndpoint

SHORT = Bounds(connect_s=2.0, silence_s=2.0, write_s=20.0)

Shapes = Mapping[str, tuple[int, int]]
"""Group -> (pages, bytes of a page)."""


def pool(
    num_pages: int,
    page_bytes: int,
    seed: int | None = None,
    staged: bool = False,
    memory: DeviceMemory | None = None,
) -> GroupRegion:
    """A private pool: numbered random pages by seed, or zeros without a seed. On a GPU, if it has its
    `memory`."""
    tensor = allocate_private(num_pages * page_bytes).tensor.view(num_pages, page_bytes)
    if seed is not None:
        page = np.random.default_rng(seed).integers(0, 256, page_bytes, np.uint8)
        pages = tensor.numpy()
        pages[:] = page  # random by the byte takes seconds for the large pools; numbered pages differ as well
        pages[:, :8] = np.arange(num_pages, dtype="<i8")[:, None].view(np.uint8)
    return GroupRegion(tensor, copies=StandInCopies(late=True) if staged or memory else None, memory=memory)


def pools(
    shapes: Shapes, seed: int, staged: bool = False, memory: DeviceMemory | None = None
) -> dict[str, GroupRegion]:
    """A `pool` for every group, each with different bytes."""
    return {name: pool(*shape, seed + i, staged, memory) for i, (name, shape) in enumerate(shapes.items())}


def gpu_for(backend: str) -> DeviceMemory | None:
    """A stand-in for the GPU that the pools of this backend lie on; None: they lie on the host."""
    return stand_in_memory() if backend == "cuda_ipc" else None


@contextmanager
def receiving_groups(
    backend: str, shapes: Shapes, bounds: Bounds = SHORT, staged: bool = False, encrypted: bool = False
) -> Iterator[tuple[PoolReceiver, dict[str, torch.Tensor]]]:
    """A decode worker's open pools and their bytes."""
    memory = gpu_for(backend)
    with ExitStack() as cleanup:
        regions = {}
        for name, (num_pages, page_bytes) in shapes.items():
            nbytes = num_pages * page_bytes
            made: PoolBuffer = memory.allocate(nbytes) if memory else allocate_shared(nbytes)
            buffer = cleanup.enter_context(made)
            tensor = buffer.tensor.view(num_pages, page_bytes)
            copies = StandInCopies(late=True) if staged or memory else None
            regions[name] = GroupRegion(tensor, buffer.fd, copies, memory)
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
    """A process with pools of random pages (by seed), here or on a GPU, that writes what it is told to."""

    def __init__(self, backend: str, shapes: Shapes, seed: int, gpu: str = "") -> None:
        """`gpu`: the real one that has the pools."""
        self.pools = {name: region.tensor for name, region in pools(shapes, seed).items()}
        self._conn, theirs = FORKSERVER.Pipe()
        context = multiprocessing.get_context("spawn") if gpu else FORKSERVER  # CUDA does not survive a fork
        self.process: BaseProcess = context.Process(
            target=_sender_main, args=(theirs, backend, shapes, seed, gpu), daemon=True
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


def _sender_main(conn: Connection, backend: str, shapes: Shapes, seed: int, gpu: str) -> None:
    regions = pools(shapes, seed, memory=None if gpu else gpu_for(backend))
    if gpu:
        regions = {name: region_of(region.tensor.to(gpu)) for name, region in regions.items()}
    sender = open_sender(regions, host_identity(), backend, bounds=SHORT)
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
