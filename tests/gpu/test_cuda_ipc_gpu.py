"""cuda_ipc between real processes on a real GPU, and between two where there are two."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from common.errors import TransferError
from common.host import host_identity
from kvcache.device_memory import allocate_exported
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import region_of
from kvtransfer.select import open_receiver, open_sender
from tests.kvtransfer.peers import SHORT, SenderProcess, grants_out, permuted, pool

PAGES, SIZE = 128, 1 << 20
SHAPES = {"full": (PAGES, SIZE)}
PATIENCE_S = 120.0  # a process that imports torch and starts CUDA
ALL = np.arange(1, PAGES)


@pytest.fixture(params=["same", "other"])
def sending_gpu(request: pytest.FixtureRequest, device: str) -> str:
    """The GPU of the prefill worker."""
    if request.param == "same":
        return device
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the two GPUs have no peer access to each other")
    return "cuda:1"


@contextmanager
def receiving(device: str) -> Iterator[tuple[PoolReceiver, torch.Tensor]]:
    """A decode worker's pool on the GPU."""
    buffer = allocate_exported(torch.device(device), PAGES * SIZE)
    assert buffer is not None, "this GPU cannot share memory; the log says why"
    with buffer:
        tensor = buffer.tensor.view(PAGES, SIZE)
        with closing(open_receiver({"full": region_of(tensor, buffer.fd)}, bounds=SHORT)) as receiver:
            assert receiver.backends[0] == "cuda_ipc"
            yield receiver, tensor


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def test_pages_go_from_pool_to_pool(device: str, sending_gpu: str) -> None:
    rng = np.random.default_rng(0)
    with receiving(device) as (receiver, there), SenderProcess("cuda_ipc", SHAPES, 1, sending_gpu) as sender:
        for room in range(3):
            src, dst = permuted(rng, PAGES, 60), permuted(rng, PAGES, 60)
            receiver.open(room, 0, {"full": dst})
            there.zero_()
            torch.cuda.synchronize()
            sender.start(receiver.endpoints[0], PageWrite(room, 0, "full", src, dst))
            assert sender.outcome(PATIENCE_S) == 60 * SIZE
            expected = torch.zeros_like(there, device="cpu")
            expected[torch.from_numpy(dst)] = sender.pools["full"][torch.from_numpy(src)]
            assert torch.equal(there.cpu(), expected)
            assert receiver.landed(room, 0).backend == "cuda_ipc"
            assert receiver.close_room(room, 0).passed


def test_nothing_lands_behind_the_fence_of_a_killed_sender(device: str, sending_gpu: str) -> None:
    """The copies of a process end before the kernel reports its exit."""
    for _ in range(5):
        with (
            receiving(device) as (receiver, there),
            SenderProcess("cuda_ipc", SHAPES, 1, sending_gpu) as sender,
        ):
            receiver.open(1, 0, {"full": ALL})
            sender.start(receiver.endpoints[0], PageWrite(1, 0, "full", ALL, ALL), times=100_000)
            until(lambda: grants_out(receiver._rooms) == 1 and receiver.landed(1, 0).total > 0)
            sender.process.kill()
            assert receiver.close_room(1, 0).wait(20)
            there.zero_()
            torch.cuda.synchronize()
            time.sleep(0.5)
            assert not there.any()


def test_a_receiver_that_is_killed_costs_its_writes_only(device: str, sending_gpu: str) -> None:
    """Its memory is there as long as it is mapped, so copies under way do not fault."""
    regions = {"full": region_of(pool(PAGES, SIZE, 1).tensor.to(sending_gpu))}
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_receiver_main, args=(theirs, device), daemon=True)
    process.start()
    with closing(open_sender(regions, host_identity(), "cuda_ipc", bounds=SHORT)) as sender:
        assert mine.poll(PATIENCE_S)
        endpoint, ended = mine.recv(), threading.Event()

        def write() -> None:
            try:
                while True:
                    sender.write(endpoint, PageWrite(1, 0, "full", ALL, ALL))
            except TransferError:
                ended.set()

        thread = threading.Thread(target=write)
        thread.start()
        assert mine.poll(PATIENCE_S)
        process.kill()
        assert ended.wait(PATIENCE_S)
        thread.join()
        process.join(PATIENCE_S)
        assert torch.equal(regions["full"].tensor.cpu(), pool(PAGES, SIZE, 1).tensor), "CUDA still works"


def _receiver_main(conn: Connection, device: str) -> None:
    with receiving(device) as (receiver, _):
        receiver.open(1, 0, {"full": ALL})
        conn.send(receiver.endpoints[0])
        until(lambda: receiver.landed(1, 0).total > 0)
        conn.send(None)
        time.sleep(PATIENCE_S)
