"""What of a worker's memory its peers can reach: descriptors that shm sends, and what Mooncake registers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

from common.errors import TransferError
from common.host import host_identity
from kvcache.buffers import allocate_shared
from kvtransfer.frames import PoolInfo
from kvtransfer.mooncake_engine import MooncakeEngine
from kvtransfer.pages import PageWrite
from kvtransfer.region import GroupRegion
from kvtransfer.rooms import RoomTable
from kvtransfer.select import open_sender
from kvtransfer.shm import ShmReceiver
from kvtransfer.transport import Bounds
from tests.kvtransfer.peers import pool, receiving_groups

WRITE = PageWrite(1, 0, "full", np.arange(1, 3), np.arange(1, 3))
PAGES = 4
PAGE_BYTES = 4096


class LyingReceiver(ShmReceiver):
    """Says that its pool has more pages than it has, and grants them."""

    def _infos(self) -> dict[str, PoolInfo]:
        return {"full": PoolInfo(PAGE_BYTES, self.pages)}

    pages = PAGES


@contextmanager
def memory_file(nbytes: int) -> Iterator[int]:
    """A descriptor as in an older version: not sealed."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        yield fd
    finally:
        os.close(fd)


def write_to(fd: int, receiver_type: type[ShmReceiver] = ShmReceiver, write: PageWrite = WRITE) -> None:
    """Write to a receiver that passes this descriptor."""
    rooms = RoomTable()
    region = GroupRegion(torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8), fd=fd)
    rooms.open(1, 0, {"full": write.dst_pages})
    source = {"full": pool(PAGES, PAGE_BYTES, 1)}
    with (
        closing(receiver_type({"full": region}, rooms, Bounds())) as receiver,
        closing(open_sender(source, host_identity(), "shm")) as sender,
    ):
        sender.write(receiver.endpoint, write)


def test_a_sealed_pool_is_mapped() -> None:
    with allocate_shared(PAGES * PAGE_BYTES) as buffer:
        write_to(buffer.fd)
        assert bool(buffer.tensor.view(PAGES, PAGE_BYTES)[1:3].any())


def test_a_pool_that_could_shrink_is_not_mapped() -> None:
    with memory_file(PAGES * PAGE_BYTES) as fd, pytest.raises(TransferError, match="not sealed"):
        write_to(fd)


def test_a_pool_smaller_than_announced_is_not_mapped() -> None:
    with allocate_shared(PAGE_BYTES) as buffer, pytest.raises(TransferError, match="announced"):
        write_to(buffer.fd)


@pytest.mark.parametrize("pages", [1 << 20, 1 << 60, -1, 0])
def test_a_receiver_that_lies_about_its_pool_is_not_written_to(pages: int) -> None:
    class Liar(LyingReceiver):
        pass

    Liar.pages = pages
    with allocate_shared(PAGES * PAGE_BYTES) as buffer, pytest.raises(TransferError, match="announced"):
        write_to(buffer.fd, Liar)


@pytest.mark.parametrize(("ranges", "copies"), [(1, 2), (2, 1), (0, 1), (1, 0), (-1, -1), (1, 1 << 60)])
def test_a_receiver_that_lies_about_parts_is_not_written_to(ranges: int, copies: int) -> None:
    class Liar(LyingReceiver):
        def _infos(self) -> dict[str, PoolInfo]:
            return {"full": PoolInfo(PAGE_BYTES, PAGES, (), ranges, copies)}

    with allocate_shared(PAGES * PAGE_BYTES) as buffer, pytest.raises(TransferError, match="cannot map"):
        write_to(buffer.fd, Liar)


@pytest.mark.parametrize("page", [PAGES, 1 << 40, -1])
def test_a_granted_page_outside_the_pool_is_not_written(page: int) -> None:
    write = PageWrite(1, 0, "full", np.array([1]), np.array([page]))
    with (
        allocate_shared(PAGES * PAGE_BYTES) as buffer,
        pytest.raises(TransferError, match="does not have"),
    ):
        write_to(buffer.fd, write=write)


def test_mooncake_registers_only_pools_that_it_writes_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages go through staging buffers; a source is not registered over TCP."""
    registered: list[tuple[int, int]] = []
    register = MooncakeEngine.register

    def recorded(engine: MooncakeEngine, ptr: int, nbytes: int) -> None:
        registered.append((ptr, nbytes))
        register(engine, ptr, nbytes)

    monkeypatch.setattr(MooncakeEngine, "register", recorded)
    shapes = {"small": (8, 4096), "large": (4, 256 << 10)}
    with receiving_groups("mooncake", shapes) as (receiver, tensors):
        large = tensors["large"]
        assert registered == [(large.data_ptr(), large.numel())]
        registered.clear()
        source = {name: pool(*shape, 1) for name, shape in shapes.items()}
        with closing(open_sender(source, host_identity(), "mooncake")) as sender:
            assert registered == []
            receiver.open(1, 0, {name: np.arange(1, 3) for name in shapes})
            for name in shapes:
                sender.write(receiver.endpoints[0], PageWrite(1, 0, name, np.arange(1, 3), np.arange(1, 3)))
                assert (tensors[name][1:3] == source[name].tensor[1:3]).all()
        pools = [(region.ptr, region.nbytes) for region in (*source.values(), *receiver.regions.values())]
        assert not set(pools) & set(registered), "what was registered later are staging buffers"
        assert {nbytes for _, nbytes in registered} == {8 << 20}
