"""HostPool: pages in the host's memory, for each KV group of the device's pools."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from common.errors import ConfigError
from kvcache.allocator import NO_PAGES, Pages, TokenToKVPoolAllocator
from kvcache.buffers import PoolBuffer, allocate_private
from kvcache.layout import GroupSpec

log = logging.getLogger(__name__)


class PinnedBuffer(PoolBuffer):
    """`nbytes` of memory that is pinned for a GPU: it is registered with CUDA until `close`.

    torch's allocator of pinned memory would round it up to a power of two: 140 GB to 275 GB.
    """

    def __init__(self, nbytes: int, gpu: torch.device) -> None:
        """Raises ConfigError if CUDA does not pin so much."""
        super().__init__(allocate_private(nbytes).tensor)
        self._gpu = gpu
        try:
            self._call("cudaHostRegister", self.tensor.data_ptr(), nbytes, 0)
        except torch.cuda.CudaError as error:
            raise ConfigError(
                "hicache_ratio",
                f"{nbytes} bytes of host memory cannot be pinned ({error})",
                "lower hicache_ratio or hicache_size",
            ) from error

    def close(self) -> None:
        """No copy may still run. Idempotent."""
        if self._tensor is not None:
            try:
                self._call("cudaHostUnregister", self._tensor.data_ptr())
            except torch.cuda.CudaError as error:
                log.warning("host memory stays pinned: %s", error)
        super().close()

    def _call(self, name: str, *args: int) -> None:
        with torch.cuda.device(self._gpu):  # CUDA would open a context on the current device
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(getattr(cudart, name)(*args))


class HostArena:
    """One group's host pages 1..num_pages as `bytes`, uint8 `[num_pages + 1, page_bytes]`: the same blobs as
    on the device. Page 0 is nobody's."""

    def __init__(self, page_bytes: int, num_pages: int, gpu: torch.device | None = None) -> None:
        """`gpu`: see HostPool."""
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.allocator = TokenToKVPoolAllocator(num_pages)
        self._buffer: PoolBuffer | None = None
        shape, nbytes = (num_pages + 1, page_bytes), (num_pages + 1) * page_bytes
        if nbytes:
            self._buffer = allocate_private(nbytes) if gpu is None else PinnedBuffer(nbytes, gpu)
            self.bytes = self._buffer.tensor[:nbytes].view(shape)
        else:
            self.bytes = torch.empty(shape, dtype=torch.uint8)

    def view(self, page: int) -> memoryview:
        """The bytes of one page."""
        return memoryview(self.bytes[page].numpy())  # type: ignore[arg-type]

    def close(self) -> None:
        """Give the memory up. A tensor over it stays usable."""
        if self._buffer is not None:
            self._buffer.close()


class HostPool:
    """The arenas of all groups. Pages of several groups are allocated together or not at all."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        page_size: int,
        pages: Mapping[str, int],
        gpu: torch.device | None = None,
    ) -> None:
        """`pages`: how many each group has. `gpu`: the memory is pinned for copies to and from it."""
        self.arenas = {
            spec.name: HostArena(spec.page_bytes(page_size), pages[spec.name], gpu) for spec in specs
        }

    def alloc(self, wanted: Mapping[str, int]) -> dict[str, Pages] | None:
        """So many pages of each group; None, and no page is allocated, when a group has too few."""
        if any(self.short(group, n) for group, n in wanted.items()):
            return None
        taken = {}
        for group, n in wanted.items():
            pages = self.arenas[group].allocator.alloc_pages(n)
            assert pages is not None, "free pages were counted, yet cannot be allocated"
            taken[group] = pages
        return taken

    def short(self, group: str, wanted: int) -> int:
        """How many pages of a group are missing."""
        return max(0, wanted - self.arenas[group].allocator.available_pages())

    def free(self, pages: Mapping[str, Pages]) -> None:
        """Give pages back, each once; those that are 0 are none."""
        for group, ids in pages.items():
            kept = ids[ids != 0] if len(ids) else NO_PAGES
            self.arenas[group].allocator.free_page_ids(kept)

    def views(self) -> list[memoryview]:
        """The bytes of each arena."""
        return [
            memoryview(arena.bytes.numpy().reshape(-1))  # type: ignore[arg-type]
            for arena in self.arenas.values()
            if arena.page_bytes
        ]

    def close(self) -> None:
        """Give the memory up."""
        for arena in self.arenas.values():
            arena.close()
