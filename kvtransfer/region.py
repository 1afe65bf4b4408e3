"""The memory that pages are moved from and to: one PoolRegion per worker, one GroupRegion per KV group.

A region on the host is used in place. A region that the CPU cannot address (a GPU's) is copied through two
pinned host buffers, a few pages at a time: while one is on the network, the other is copied. Backends that
need only an address (RDMA) use `ptr`.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from kvcache.device_memory import DeviceMemory, device_memory
from kvcache.divided import SpreadKVCache
from kvcache.memory import Memory
from kvcache.page_parts import ONE_PART, PageParts
from kvcache.page_runs import PageIds
from kvcache.pool import KVCache
from kvtransfer.copies import Copied, CopyQueue, CudaCopies, HostCopies, settle

_STAGE_BYTES = 4 << 20  # each of the two buffers of a transfer


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

    `tensor` is the same memory as uint8 `[num_pages, page_bytes]` and keeps it alive. `fd` is what another
    process can map of it, from offset 0, when there is such a thing: a memfd, or what `memory` has exported.
    `copies` are there when the CPU cannot address it, `memory` when its device can share memory.
    `page_parts` says how pages lie in the `parts`.
    """

    tensor: torch.Tensor
    fd: int | None = None
    copies: CopyQueue | None = None
    memory: DeviceMemory | None = None
    page_parts: PageParts = ONE_PART

    def __post_init__(self) -> None:
        assert self.tensor.dtype == torch.uint8, "a region is bytes"
        assert self.tensor.ndim == 2, "a region is [page, byte]"
        assert self.tensor.is_contiguous(), "a region is contiguous"

    @property
    def ptr(self) -> int:
        """Address of page 0 (a device address when the tensor is on a device)."""
        return self.tensor.data_ptr()

    @property
    def parts(self) -> tuple[GroupRegion, ...]:
        """The memories that it lies in, each with a part of every page."""
        return (self,)

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
        """These pages, in order, in batches that the CPU can read. A batch is valid until the next one. When
        this has ended or is closed, no page is read any more. If it cannot be known, it raises Unsettled."""
        if self.copies is None:
            yield HostPages(self.ptr, self.nbytes, pages)
            return
        stages = self._stages(self.copies)
        batches = list(self._batches(pages))
        coming: deque[Copied] = deque()
        try:
            for at, batch in enumerate(batches):
                for ahead in range(at + len(coming), min(at + 2, len(batches))):
                    coming.append(self._gather(self.copies, stages[ahead % 2], batches[ahead]))
                coming.popleft().wait()
                yield _staged(stages[at % 2], len(batch))
        except BaseException:  # of a copy or of the caller, or the caller closes this
            settle(self.copies)
            raise

    def from_host(self, pages: PageIds) -> Generator[HostPages]:
        """Batches for the caller to fill. All are in the region when this has ended.

        A caller that must not write any more closes this: then its last batch is not applied, and nothing is
        written after that. Where the region is used in place, it is applied as far as it was filled. When it
        cannot be known whether something will still be written, this raises Unsettled.
        """
        if self.copies is None:
            yield HostPages(self.ptr, self.nbytes, pages)
            return
        stages = self._stages(self.copies)
        going: deque[Copied] = deque()
        try:
            for at, batch in enumerate(self._batches(pages)):
                if len(going) == 2:
                    going.popleft().wait()  # what was in this buffer
                yield _staged(stages[at % 2], len(batch))
                going.append(self._scatter(self.copies, stages[at % 2], batch))
            while going:
                going.popleft().wait()
        except BaseException:  # of a copy or of the caller, or the caller closes this
            settle(self.copies)
            raise

    def _gather(self, copies: CopyQueue, stage: torch.Tensor, batch: PageIds) -> Copied:
        ids, count = self._ids(copies, batch), len(batch)

        def gather() -> None:
            stage[:count].copy_(self._read(ids), non_blocking=True)

        return copies.put(gather)

    def _scatter(self, copies: CopyQueue, stage: torch.Tensor, batch: PageIds) -> Copied:
        ids, count = self._ids(copies, batch), len(batch)

        def scatter() -> None:
            self._write(ids, stage[:count].to(self.tensor.device, non_blocking=True))

        return copies.put(scatter)

    def _read(self, ids: torch.Tensor) -> torch.Tensor:
        """Pages on the device, `[n, page_bytes]`; `ids` are pinned."""
        return self.tensor.index_select(0, ids.to(self.tensor.device, non_blocking=True))

    def _write(self, ids: torch.Tensor, pages: torch.Tensor) -> None:
        """Overwrite pages on the device."""
        self.tensor.index_copy_(0, ids.to(self.tensor.device, non_blocking=True), pages)

    def piece(self, page: int, start: int, end: int) -> torch.Tensor:
        """Bytes [start, end) of a page, on the device."""
        return self.tensor[page, start:end]

    @staticmethod
    def _ids(copies: CopyQueue, batch: PageIds) -> torch.Tensor:
        """The page ids in memory that a copy to the device may read."""
        ids = copies.pinned(8 * len(batch)).view(torch.int64)
        return ids.copy_(torch.from_numpy(batch))

    def _stages(self, copies: CopyQueue) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers of their own for each transfer: one that is stuck with its peer holds up no other."""
        pages = self._pages_at_once()
        return copies.pinned(pages, self.page_bytes), copies.pinned(pages, self.page_bytes)

    def _batches(self, pages: PageIds) -> Iterator[PageIds]:
        step = self._pages_at_once()
        return (pages[first : first + step] for first in range(0, len(pages), step))

    def _pages_at_once(self) -> int:
        return max(1, min(self.num_pages, _STAGE_BYTES // self.page_bytes))


@dataclass(frozen=True)
class SpreadRegion(GroupRegion):
    """A region whose pages lie in several memories. `tensor` is the first part, which no other one is read or
    written through; `copies` put pages together there."""

    pool: SpreadKVCache = field(kw_only=True)
    of_ranks: tuple[GroupRegion, ...] = field(kw_only=True)

    @property
    def ptr(self) -> int:
        raise AssertionError("its pages lie in several memories")

    @property
    def parts(self) -> tuple[GroupRegion, ...]:
        return self.of_ranks

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    def _read(self, ids: torch.Tensor) -> torch.Tensor:
        return self.pool.read(ids)

    def _write(self, ids: torch.Tensor, pages: torch.Tensor) -> None:
        self.pool.write(ids, pages)

    def piece(self, page: int, start: int, end: int) -> torch.Tensor:
        return self.pool.read(torch.tensor([page]))[0, start:end]


def _staged(stage: torch.Tensor, count: int) -> HostPages:
    return HostPages(stage.data_ptr(), stage.numel(), np.arange(count))


PoolRegion = Mapping[str, GroupRegion]
"""A worker's pools by group name."""
NO_REGIONS: PoolRegion = MappingProxyType({})


def region_of(pool: torch.Tensor, fd: int | None = None, page_parts: PageParts = ONE_PART) -> GroupRegion:
    """The region of a pool's bytes `[num_pages, page_bytes]`, on the host or a CUDA device."""
    if pool.device.type == "cpu":
        return GroupRegion(pool, fd, page_parts=page_parts)
    return GroupRegion(pool, fd, CudaCopies(pool.device), device_memory(pool.device), page_parts)


def pool_region(pool: KVCache) -> GroupRegion:
    """The region of a pool, in one memory or several."""
    if not isinstance(pool, SpreadKVCache):
        return region_of(pool.bytes, pool.fd, pool.page_parts)
    return spread_region(pool, tuple(region_of(part.bytes, part.fd) for part in pool.parts))


def spread_region(pool: SpreadKVCache, parts: tuple[GroupRegion, ...]) -> SpreadRegion:
    """The region of a pool whose parts have these."""
    first = parts[0].tensor
    copies = parts[0].copies or copies_of(first.device)
    return SpreadRegion(first, copies=copies, page_parts=pool.page_parts, pool=pool, of_ranks=parts)


def copies_of(device: torch.device) -> CopyQueue:
    """Copies between a device and host memory that is not in place there."""
    return HostCopies() if device.type == "cpu" else CudaCopies(device)


def pool_regions(memory: Memory) -> dict[str, GroupRegion]:
    """A worker's pools by group, without those that have no bytes (a full group without layers)."""
    return {name: pool_region(pool) for name, pool in memory.kv_caches.items() if pool.page_bytes}


def arena_regions(memory: Memory) -> PoolRegion:
    """The host tier's pages by group, likewise; none without such a tier. Nobody writes to them from
    outside."""
    if memory.tiers is None:
        return NO_REGIONS
    arenas = memory.tiers.host.pool.arenas
    return {name: GroupRegion(arena.bytes) for name, arena in arenas.items() if arena.page_bytes}


def check_pages(region: GroupRegion, pages: PageIds) -> bool:
    """Whether all page ids lie in the region."""
    return len(pages) == 0 or (int(pages.min()) >= 0 and int(pages.max()) < region.num_pages)
