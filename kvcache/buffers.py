"""The memory of a pool on a CPU host: private, or a memfd that another process may map.

Both ask for huge pages: attention and transfer access pages in random order, and with 4 KiB mappings most
time goes to TLB misses. `/dev/shm` is not used because it is 64 MB in many containers.

A memfd is sealed: nobody can change its size, neither its creator nor a process that maps it. Without that,
one of them could shrink it, and every other one would die of SIGBUS at its next access.

Lifetime: `close` closes the descriptor and drops this object's tensor. The memory is unmapped with the last
tensor over it: unmapping it under a live tensor would turn a late read into a crash.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Self

import torch

HUGE_PAGE_BYTES = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolBuffer:
    """Zeroed memory as `.tensor` (uint8, 1-D). `fd` is what another process can map, None when there is
    nothing. Usable as a context manager."""

    def __init__(self, tensor: torch.Tensor, fd: int | None = None) -> None:
        """Own `fd`."""
        self.fd = fd
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, uint8. Not after `close`."""
        assert self._tensor is not None, "the buffer is closed"
        return self._tensor

    def close(self) -> None:
        """Drop the tensor and close the descriptor. Idempotent."""
        self._tensor = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostBuffer(PoolBuffer):
    """`nbytes` of host memory."""

    def __init__(self, mapping: mmap.mmap, nbytes: int, fd: int | None = None) -> None:
        """Own `mapping` and `fd`. The tensor starts at the first huge page border if the mapping is large
        enough. So does its storage: torch takes a slice for pinned only if the start of its storage is."""
        _advise_huge_pages(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        start = -address % HUGE_PAGE_BYTES if len(mapping) >= nbytes + HUGE_PAGE_BYTES else 0
        super().__init__(torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start), fd)
        self.nbytes = nbytes


class SharedBuffer(HostBuffer):
    """Memory of a memfd: a process that is sent `.fd` over a Unix socket can map the same bytes."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` of `fd` and own both. The creator and the receiver of the descriptor both call
        this."""
        super().__init__(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), nbytes, fd)


def allocate_private(nbytes: int) -> HostBuffer:
    """Zeroed memory of this process only, aligned to huge pages when it is large enough to use them."""
    slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0
    return HostBuffer(mmap.mmap(-1, nbytes + slack, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)


def allocate_shared(nbytes: int) -> SharedBuffer:
    """Zeroed memory that other processes can map, of a size that is final. The descriptor is closed on
    exec."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return SharedBuffer(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def check_sealed(fd: int, nbytes: int) -> None:
    """Raise OSError or ValueError unless `fd` is a memfd of at least `nbytes` whose size is final. To be
    called before a descriptor that another process sent is mapped."""
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise ValueError(f"it has {size} bytes, and {nbytes} are announced")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("it is not sealed: its size can change")


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this kernel has no transparent huge pages; only slower
            raise
