"""Where the bytes of a pool live on a CPU host: private memory, or a memfd that another process may map.

Both ask for huge pages: attention and transfer walk pages in random order, and 4 KiB mappings spend more
time in the TLB than in memory. Not `/dev/shm`: it is 64 MB in many containers.

Lifetime: `close` gives up the descriptor and this object's view. The mapping itself goes when the last
tensor over it does, because unmapping under a live tensor would turn a late read into a crash.
"""

from __future__ import annotations

import errno
import mmap
import os

import torch

HUGE_PAGE_BYTES = 2 << 20


class HostBuffer:
    """`nbytes` of zeroed host memory as `.tensor` (uint8, 1-D). Usable as a context manager."""

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        """Take over `mapping`; the tensor starts at its first huge page border if it is large enough."""
        _advise_huge_pages(mapping)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES if len(mapping) >= nbytes + HUGE_PAGE_BYTES else 0
        self.nbytes = nbytes
        self._tensor: torch.Tensor | None = whole[start : start + nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, uint8 `[nbytes]`. Not after `close`."""
        assert self._tensor is not None, "the buffer is closed"
        return self._tensor

    def close(self) -> None:
        """Let go; calling it again changes nothing."""
        self._tensor = None

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedBuffer(HostBuffer):
    """Memory of a memfd: whoever is given `.fd` over a Unix socket can map the same bytes."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` of `fd` and own both; a receiver of the descriptor calls this as the creator does."""
        self.fd = fd
        super().__init__(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), nbytes)

    def close(self) -> None:
        """Let go of the memory and close the descriptor."""
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def allocate_private(nbytes: int) -> HostBuffer:
    """Zeroed memory of this process only, aligned to huge pages when it is large enough to use them."""
    slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0
    return HostBuffer(mmap.mmap(-1, nbytes + slack, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)


def allocate_shared(nbytes: int) -> SharedBuffer:
    """Zeroed memory that other processes can map. The descriptor is closed on exec."""
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return SharedBuffer(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this kernel has no transparent huge pages; only slower
            raise
