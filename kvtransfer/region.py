"""The memory that pages are moved from and to: one PoolRegion per worker, one GroupRegion per KV group.

A region on the host is used in place. A region that the CPU cannot address (a GPU's) is copied through a
pinned host buffer, a few pages at a time. Backends that need only an address (RDMA) use `ptr`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvcache.memory import Memory
from kvtransfer.pages import PageIds

_STAGE_BYTES = 8 << 20


class HostPages(NamedTuple):
    """Pages the CPU can address: page `pages[i]` is the `page_bytes` from `ptr + pages[i] * page_bytes` on.

    `nbytes` is all that may be touched from `ptr` on.
    """

    ptr: int
    nbytes: int
    pages: PageIds

    def view(self) -> memoryview:
        """The whole memory, writable; valid as long as the batch is."""
        return memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.ptr)).cast("B")


@dataclass(frozen=True)
class GroupRegion:
    """One KV group's pool: `num_pages` pages (the scratch page 0 included) of `page_bytes` from `ptr` on.

    `tensor` is the same memory as uint8 `[num_pages, page_bytes]` and keeps it alive. `fd` is the memfd that
    holds it, from offset 0, when there is one. `staged` says that the CPU cannot address it.
    """

    tensor: torch.Tensor
    fd: int | None = None
    staged: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.tensor.dtype == torch.uint8, "a region is bytes"
        assert self.tensor.ndim == 2, "a region is [page, byte]"
        assert self.tensor.is_contiguous(), "a region is contiguous"

    @property
    def ptr(self) -> int:
        """Address of page 0 (a device address when the tensor is on a device)."""
        return self.tensor.data_ptr()

    @property
    def num_pages(self) -> int:
        """Pages in the region, the scratch page included."""
        return self.tensor.shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.num_pages * self.page_bytes

    def to_host(self, pages: PageIds) -> Generator[HostPages]:
        """These pages, in order, in batches that the CPU can read. A batch is valid until the next one."""
        if not self.staged:
            yield HostPages(self.ptr, self.nbytes, pages)
            return
        with self._lock:  # a second user waits for the staging buffer
            stage = self._stage()
            for first in range(0, len(pages), len(stage)):
                batch = torch.from_numpy(pages[first : first + len(stage)])
                count = len(batch)
                stage[:count].copy_(self.tensor[batch.to(self.tensor.device)])
                yield HostPages(stage.data_ptr(), stage.numel(), np.arange(count))

    def from_host(self, pages: PageIds) -> Generator[HostPages]:
        """Batches for the caller to fill. A batch is in the region when the caller asks for the next one.

        A caller that must not write any more stops iterating: then its last batch is not applied. Where the
        region is used in place, it is applied as far as it was filled.
        """
        if not self.staged:
            yield HostPages(self.ptr, self.nbytes, pages)
            return
        with self._lock:
            stage = self._stage()
            for first in range(0, len(pages), len(stage)):
                batch = torch.from_numpy(pages[first : first + len(stage)]).to(self.tensor.device)
                count = len(batch)
                yield HostPages(stage.data_ptr(), stage.numel(), np.arange(count))
                self.tensor[batch] = stage[:count].to(self.tensor.device)

    def _stage(self) -> torch.Tensor:
        """Pinned when a device will copy from it: pageable memory halves the rate and blocks the stream."""
        pages = max(1, min(self.num_pages, _STAGE_BYTES // self.page_bytes))
        return torch.empty(
            (pages, self.page_bytes), dtype=torch.uint8, pin_memory=self.tensor.device.type == "cuda"
        )


PoolRegion = Mapping[str, GroupRegion]
"""A worker's pools by group name."""


def region_of(pool: torch.Tensor, fd: int | None = None) -> GroupRegion:
    """The region of a pool's bytes `[num_pages, page_bytes]`; staged when they are not on the host."""
    return GroupRegion(pool, fd=fd, staged=pool.device.type != "cpu")


def pool_regions(memory: Memory) -> dict[str, GroupRegion]:
    """A worker's pools by group, without those that have no bytes (a full group without layers)."""
    return {
        name: region_of(pool.bytes, pool.fd) for name, pool in memory.kv_caches.items() if pool.page_bytes
    }


def check_pages(region: GroupRegion, pages: PageIds) -> bool:
    """Whether all page ids lie in the region."""
    return len(pages) == 0 or (int(pages.min()) >= 0 and int(pages.max()) < region.num_pages)
