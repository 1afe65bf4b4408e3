"""shm: the decode worker's pool is a memfd that prefill workers on the same host map and write into.

Who is let in, and when a write is over: local.py.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import closing

from common.errors import ConfigError, TransferError
from kvcache.buffers import check_sealed
from kvcache.page_runs import copy_pages
from kvtransfer.channel import GrantedWrite
from kvtransfer.frames import PoolInfo
from kvtransfer.local import LocalReceiver, LocalSender
from kvtransfer.region import GroupRegion, PoolRegion
from kvtransfer.rooms import RoomTable
from kvtransfer.transport import Bounds

BACKEND = "shm"


def possible(regions: PoolRegion) -> bool:
    """Whether every pool is in shared memory."""
    return all(_is_shared(region) for region in regions.values())


def _is_shared(region: GroupRegion) -> bool:
    """Pages may be in several memories, whole in each."""
    return region.page_parts.ranges == 1 and all(
        part.fd is not None and part.copies is None for part in region.parts
    )


class ShmReceiver(LocalReceiver):
    """ReceiverTransport over pools that live in memfds."""

    def __init__(self, regions: PoolRegion, rooms: RoomTable, bounds: Bounds) -> None:
        """Raises ConfigError when a pool is not in shared memory."""
        for group, region in regions.items():
            if not _is_shared(region):
                raise ConfigError(
                    "kv_transfer_backend",
                    f"shm needs a shared pool and group {group} is not in one",
                    "allocate the pool in shared memory, or use tcp",
                )
        super().__init__(BACKEND, {}, regions, rooms, bounds)


class _Mapping:
    """One receiver's pool in this process's memory."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises OSError or ValueError, and then nothing is mapped."""
        check_sealed(fd, nbytes)
        self.nbytes = nbytes
        self._mmap = mmap.mmap(fd, nbytes)
        self._mmap.madvise(mmap.MADV_DONTFORK)  # a forked child could write after this process has exited
        self._mmap.madvise(mmap.MADV_HUGEPAGE)
        self._export: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mmap)
        self.ptr = ctypes.addressof(self._export)

    def close(self) -> None:
        self._export = None  # an mmap with an exported buffer cannot be closed
        self._mmap.close()


class ShmSender(LocalSender):
    """SenderTransport that stores straight into the receiver's pool."""

    def _map(self, region: GroupRegion, info: PoolInfo, fds: Sequence[int]) -> Iterator[_Mapping]:  # noqa: ARG002
        if info.ranges != 1:
            raise TransferError("no part of it has whole pages")
        return (_Mapping(fd, info.page_bytes * info.num_pages) for fd in fds)

    def _move(self, granted: GrantedWrite) -> None:
        region, write, pool = granted.region, granted.write, self._target(granted)
        done = 0
        with closing(region.to_host(write.src_pages)) as batches:
            for host in batches:
                dst_pages = write.dst_pages[done : done + len(host.pages)]
                for memory in pool.memories:
                    copy_pages(host.ptr, host.pages, memory.ptr, dst_pages, region.page_bytes)
                done += len(host.pages)
