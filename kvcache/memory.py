"""Memory: everything a worker knows of its KV cache, built in one place and balanced in one place."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages, make_allocator
from kvcache.base_prefix_cache import NO_PAGES, BasePrefixCache
from kvcache.buffers import HostBuffer, SharedBuffer, allocate_private, allocate_shared
from kvcache.config import CacheConfig
from kvcache.factory import build_prefix_cache
from kvcache.layout import GroupSpec, KVGroupSpec
from kvcache.pool import KVCache, MHAKVCache, ReqToTokenPool
from wire.errors import ConfigError
from wire.records import GroupLayout


@dataclass(frozen=True)
class MemoryReport:
    """Balanced books: free + evictable + protected + held + quarantined + pending == total, in pages."""

    page_size: int
    total_pages: int
    free_pages: int
    evictable_pages: int
    protected_pages: int
    held_pages: int  # private to live requests, reserved, or waiting for a forward to land
    quarantined_pages: int  # a remote writer may still touch them
    pending_pages: int  # freed in an open free group
    total_rows: int
    free_rows: int
    held_rows: int


class Memory:
    """Pools, allocator and tree of one worker. One thread; close it, or use it as a context manager."""

    def __init__(
        self,
        config: CacheConfig,
        specs: tuple[GroupSpec, ...],
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseTokenToKVPoolAllocator,
        kv_caches: dict[str, KVCache],
        cache: BasePrefixCache,
        buffers: Sequence[HostBuffer],
    ) -> None:
        self.config = config
        self.specs = specs
        self.page_size = config.page_size
        self.num_pages = config.num_pages
        self.total_tokens = config.num_pages * config.page_size
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.kv_caches = kv_caches
        self.cache = cache
        self._buffers = buffers
        self._quarantine: dict[Hashable, list[Pages]] = {}

    @property
    def kv_cache(self) -> KVCache:
        """The pool of the group that decides reuse."""
        return self.kv_caches[self.specs[0].name]

    def shared_fd(self, group: str) -> int | None:
        """The memfd that holds a group's pool, from offset 0; None when the pool is private."""
        for spec, buffer in zip(self.specs, self._buffers, strict=False):
            if spec.name == group and isinstance(buffer, SharedBuffer):
                return buffer.fd
        return None

    def layouts(self) -> tuple[GroupLayout, ...]:
        """For the worker's record."""
        return tuple(spec.to_layout(self.page_size) for spec in self.specs)

    def close(self) -> None:
        """Give up the pools' buffers; whoever still has a tensor over one can finish with it."""
        for buffer in self._buffers:
            buffer.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- quarantine --------------------------------------------------------------------------------

    def quarantine(self, pages: npt.NDArray[np.integer], owner: Hashable) -> None:
        """Set aside allocated pages that a remote writer may still touch, until its fence has passed."""
        self._quarantine.setdefault(owner, []).append(pages.astype(np.int32))

    def release_quarantine(self, owner: Hashable) -> int:
        """The fence of `owner` has passed: free its pages. Returns how many; 0 for an unknown owner."""
        released = self._quarantine.pop(owner, [])
        for pages in released:
            self.allocator.free_page_ids(pages)
        return sum(map(len, released))

    def quarantined_pages(self) -> Pages:
        """All pages set aside."""
        return np.concatenate([NO_PAGES, *(pages for held in self._quarantine.values() for pages in held)])

    # -- balance -----------------------------------------------------------------------------------

    def check_memory(self, held_pages: Iterable[int] = (), held_rows: Iterable[int] = ()) -> MemoryReport:
        """Assert that every page and every row has exactly one owner.

        `held_pages` are those outside tree, quarantine and free list: private pages of live requests,
        reservations, deferred frees. A lost, shared or twice freed page is named in the AssertionError.
        """
        held = np.fromiter(held_pages, np.int64)
        rows = np.fromiter(held_rows, np.int64)
        owned: dict[str, npt.NDArray[np.integer]] = {
            "free": np.concatenate((self.allocator.free_pages, self.allocator.release_pages)),
            "pending": self.allocator.pending_pages(),
            "cached": self.cache.all_pages(),
            "held": held,
            "quarantined": self.quarantined_pages(),
        }
        _check_partition("page", self.num_pages, owned)
        pool = self.req_to_token_pool
        _check_partition("row", pool.size, {"free": pool.free_rows(), "held": rows})
        evictable, protected = self.cache.recount()
        assert evictable == self.cache.evictable_size(), "evictable_size is not the sum over unlocked nodes"
        assert protected == self.cache.protected_size(), "protected_size is not the sum over locked nodes"
        return MemoryReport(
            page_size=self.page_size,
            total_pages=self.num_pages,
            free_pages=len(owned["free"]),
            evictable_pages=evictable // self.page_size,
            protected_pages=protected // self.page_size,
            held_pages=len(held),
            quarantined_pages=len(owned["quarantined"]),
            pending_pages=len(owned["pending"]),
            total_rows=pool.size,
            free_rows=pool.available_size(),
            held_rows=len(rows),
        )


def build_memory(config: CacheConfig, specs: Sequence[GroupSpec]) -> Memory:
    """Allocate and connect everything. Raises ConfigError for groups that this memory cannot hold."""
    if [spec.kind for spec in specs] != ["full"]:
        kinds = ", ".join(spec.kind for spec in specs) or "none"
        raise ConfigError("model", f"its KV groups are: {kinds}", "serve a model with full attention only")
    buffers: list[HostBuffer] = []
    kv_caches: dict[str, KVCache] = {}
    for spec in specs:
        assert isinstance(spec, KVGroupSpec), "a full group"
        buffer = None
        if config.device == "cpu":
            nbytes = MHAKVCache.bytes_needed(spec, config.num_pages, config.page_size)
            buffer = allocate_shared(nbytes) if config.shared else allocate_private(nbytes)
            buffers.append(buffer)
        kv_caches[spec.name] = MHAKVCache(spec, config.num_pages, config.page_size, config.device, buffer)
    pool = ReqToTokenPool(config.max_running_requests, config.max_context_len, config.pre_alloc_size)
    allocator = make_allocator(config.num_pages, config.page_size, config.need_sort)
    cache = build_prefix_cache(config, pool, allocator)
    return Memory(config, tuple(specs), pool, allocator, kv_caches, cache, buffers)


def _check_partition(what: str, count: int, owned: dict[str, npt.NDArray[np.integer]]) -> None:
    """Every number in 1..count is in exactly one of the arrays, once."""
    everything = np.concatenate(list(owned.values()))
    times = np.bincount(everything.astype(np.int64), minlength=count + 1)
    sizes = {name: len(numbers) for name, numbers in owned.items()}
    assert len(times) == count + 1, f"a {what} beyond {count}: {sizes}"
    assert times[0] == 0, f"{what} 0 is nobody's: {sizes}"
    lost = np.flatnonzero(times[1:] == 0) + 1
    assert not len(lost), f"{len(lost)} {what}s lost, first {lost[:8].tolist()}; of {count}: {sizes}"
    shared = np.flatnonzero(times > 1)
    owners = {name: shared[np.isin(shared, numbers)][:8].tolist() for name, numbers in owned.items()}
    assert not len(shared), f"{len(shared)} {what}s owned twice, {owners}; of {count}: {sizes}"
