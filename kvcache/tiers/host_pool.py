"""HostPool: pages in the host's memory, for each KV group of the device's pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcache.allocator import NO_PAGES, Pages, TokenToKVPoolAllocator
from kvcache.buffers import PoolBuffer, allocate_private
from kvcache.layout import GroupSpec


class HostArena:
    """One group's host pages 1..num_pages as `bytes`, uint8 `[num_pages + 1, page_bytes]`: the same blobs as
    on the device. Page 0 is nobody's."""

    def __init__(self, page_bytes: int, num_pages: int, pinned: bool) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.allocator = TokenToKVPoolAllocator(num_pages)
        self._buffer: PoolBuffer | None = None
        shape, nbytes = (num_pages + 1, page_bytes), (num_pages + 1) * page_bytes
        if pinned or not nbytes:
            self.bytes = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned and nbytes > 0)
        else:
            self._buffer = allocate_private(nbytes)
            self.bytes = self._buffer.tensor[:nbytes].view(shape)

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
        self, specs: Sequence[GroupSpec], page_size: int, pages: Mapping[str, int], pinned: bool
    ) -> None:
        """`pages`: how many each group has. `pinned`: for copies to and from a GPU."""
        self.arenas = {
            spec.name: HostArena(spec.page_bytes(page_size), pages[spec.name], pinned) for spec in specs
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
