"""Writes between real processes over every backend: bytes, refusals, fences, deaths, leaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import TransferError
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from tests.kvtransfer.peers import SenderProcess, grants_out, permuted, receiving, receiving_groups

pytestmark = pytest.mark.slow

PAGES, SMALL, LARGE = 96, 24 << 10, 512 << 10  # staged and direct for mooncake
BACKENDS = ["cuda_ipc", "shm", "tcp", "mooncake"]


@pytest.fixture(scope="module", params=[(b, size) for b in BACKENDS for size in (SMALL, LARGE)], ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, int, SenderProcess]]:
    backend, size = request.param
    with SenderProcess(backend, {"full": (PAGES, size)}, seed=1) as sender:
        yield backend, size, sender


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def _state_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _writers(receiver: PoolReceiver) -> int:
    return grants_out(receiver._rooms)  # the receiver does not show its table, and no other module asks


def test_random_permutation_lands_where_it_belongs(case: tuple[str, int, SenderProcess]) -> None:
    backend, size, sender = case
    rng = np.random.default_rng(2)
    with receiving(backend, PAGES, size) as (receiver, pool):
        for room in range(3):
            src, dst = permuted(rng, PAGES, 50), permuted(rng, PAGES, 50)
            receiver.open(room, 0, {"full": dst})
            pool.zero_()
            half = 25
            for part in (slice(0, half), slice(half, None)):
                write = PageWrite(room, 0, "full", src[part], dst[part])
                assert sender.write(receiver.endpoints[0], write) == 25 * size
            landed = receiver.landed(room, 0)
            assert (landed.nbytes, landed.missing, landed.backend) == ({"full": 50 * size}, {}, backend)
            assert receiver.close_room(room, 0).passed
            expected = torch.zeros_like(pool)
            expected[torch.from_numpy(dst)] = sender.pools["full"][torch.from_numpy(src)]
            assert torch.equal(pool, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_very_different_page_sizes_share_one_connection(backend: str) -> None:
    """A window's pages are small, a state's slot is megabytes; each goes to its own pool."""
    shapes = {"full": (40, 16 << 10), "window": (20, 512), "state": (4, (3 << 20) + 64)}
    rng = np.random.default_rng(7)
    with (
        receiving_groups(backend, shapes) as (receiver, pools),
        SenderProcess(backend, shapes, seed=6) as sender,
    ):
        src = {name: permuted(rng, count, count // 2) for name, (count, _) in shapes.items()}
        dst = {name: permuted(rng, count, count // 2) for name, (count, _) in shapes.items()}
        receiver.open(1, 0, dst)
        for name, (count, size) in shapes.items():
            landed = receiver.landed(1, 0)
            assert landed.missing[name] == count // 2
            write = PageWrite(1, 0, name, src[name], dst[name])
            assert sender.write(receiver.endpoints[0], write) == count // 2 * size
        with pytest.raises(TransferError, match="has not opened these pages of group window"):
            sender.write(
                receiver.endpoints[0], PageWrite(1, 0, "window", src["full"][:1] % 20, dst["full"][:1])
            )
        landed = receiver.landed(1, 0)
        assert landed.nbytes == {name: count // 2 * size for name, (count, size) in shapes.items()}
        assert not landed.missing
        assert receiver.close_room(1, 0).passed
        for name, tensor in pools.items():
            expected = torch.zeros_like(tensor)
            expected[torch.from_numpy(dst[name])] = sender.pools[name][torch.from_numpy(src[name])]
            assert torch.equal(tensor, expected), name


def test_stale_epoch_unknown_room_and_foreign_pages_are_refused(case: tuple[str, int, SenderProcess]) -> None:
    backend, size, sender = case
    pages = np.arange(1, 5)
    with receiving(backend, PAGES, size) as (receiver, pool):
        endpoint = receiver.endpoints[0]
        receiver.open(7, 1, {"full": pages})
        for room, epoch, dst in [(7, 0, pages), (7, 2, pages), (8, 1, pages), (7, 1, pages + 1)]:
            with pytest.raises(TransferError, match="open"):
                sender.write(endpoint, PageWrite(room, epoch, "full", pages, dst))
        assert sender.write(endpoint, PageWrite(7, 1, "full", pages, pages)) == 4 * size  # connection is good
        assert receiver.close_room(7, 1).passed
        pool.zero_()
        with pytest.raises(TransferError, match="not open"):
            sender.write(endpoint, PageWrite(7, 1, "full", pages, pages))
        assert int(pool.count_nonzero()) == 0


def test_another_page_size_is_refused(case: tuple[str, int, SenderProcess]) -> None:
    backend, size, sender = case
    pages = np.arange(1, 3)
    with receiving(backend, PAGES, size // 2) as (receiver, pool):
        receiver.open(1, 0, {"full": pages})
        with pytest.raises(TransferError, match="page_bytes"):
            sender.write(receiver.endpoints[0], PageWrite(1, 0, "full", pages, pages))
        _until(lambda: _writers(receiver) == 0)
        assert receiver.close_room(1, 0).passed
        assert int(pool.count_nonzero()) == 0


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_lands_behind_the_fence_of_a_stopped_and_killed_peer(backend: str, size: int) -> None:
    count = (64 << 20) // size
    pages = np.random.default_rng(3).permutation(np.arange(1, count))
    with (
        receiving(backend, count, size) as (receiver, pool),
        SenderProcess(backend, {"full": (count, size)}, 4) as sender,
    ):
        receiver.open(1, 0, {"full": pages})
        sender.start(receiver.endpoints[0], PageWrite(1, 0, "full", pages, pages), times=2000)
        _until(lambda: int(pool[int(pages[0])].count_nonzero()) > 0, 20)
        _until(lambda: _writers(receiver) == 1)
        assert sender.process.pid is not None
        os.kill(sender.process.pid, signal.SIGSTOP)
        _until(lambda: _state_of(sender.process.pid) == "T")
        time.sleep(0.05)  # what it said before the stop has been heard
        writing = _writers(receiver) == 1
        fence = receiver.close_room(1, 0)
        if backend in ("cuda_ipc", "shm"):
            # Whether the stop caught it between two writes is up to chance; a grant that is out stays out.
            assert fence.wait(0.3) is not writing
            os.kill(sender.process.pid, signal.SIGKILL)
        assert fence.wait(8), "the fence must pass without the peer's help"
        pool.zero_()
        if backend not in ("cuda_ipc", "shm"):
            os.kill(sender.process.pid, signal.SIGCONT)
            with pytest.raises(TransferError):
                sender.outcome()
        else:
            sender.process.join(5)
        assert int(pool.count_nonzero()) == 0
        assert _writers(receiver) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_killed_in_the_middle_frees_its_room(backend: str) -> None:
    count = (64 << 20) // LARGE
    pages = np.arange(1, count)
    with (
        receiving(backend, count, LARGE) as (receiver, pool),
        SenderProcess(backend, {"full": (count, LARGE)}, 5) as sender,
    ):
        receiver.open(1, 0, {"full": pages})
        sender.start(receiver.endpoints[0], PageWrite(1, 0, "full", pages, pages), times=2000)
        _until(lambda: int(pool[1, :8].count_nonzero()) > 0 and _writers(receiver) == 1, 20)
        sender.process.kill()
        sender.process.join(5)
        _until(lambda: _writers(receiver) == 0, 5)
        assert receiver.close_room(1, 0).wait(1)


def test_a_dead_receiver_fails_the_write(case: tuple[str, int, SenderProcess]) -> None:
    backend, size, sender = case
    pages = np.arange(1, 3)
    with receiving(backend, PAGES, size) as (receiver, _):
        endpoint = receiver.endpoints[0]
    with pytest.raises(TransferError):
        sender.write(endpoint, PageWrite(1, 0, "full", pages, pages))
