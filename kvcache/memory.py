"""Memory: the pools, allocators and prefix cache of one worker, and the check that nothing of them is
lost."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from common.errors import ConfigError
from kvcache.allocator import (
    NO_PAGES,
    BaseTokenToKVPoolAllocator,
    Pages,
    TokenToKVPoolAllocator,
    make_allocator,
)
from kvcache.balance import Balance, run_through
from kvcache.buffers import PoolBuffer, allocate_private, allocate_shared
from kvcache.config import CacheConfig
from kvcache.device_memory import allocate_exported
from kvcache.divided import SpreadKVCache, pool_of_parts
from kvcache.events import EventRecorder, TreeEvents
from kvcache.factory import CacheParts, LowerParts, build_prefix_cache
from kvcache.layout import GroupSpec, KVGroupSpec, StateGroupSpec, rank_spec
from kvcache.open_pool import open_pool
from kvcache.pool import KVCache, ReqToTokenPool
from kvcache.request import GroupPages as GroupPages
from kvcache.snapshot import TreeSnapshots
from kvcache.storage.factory import open_storage
from kvcache.storage.keys import StorageKeys
from kvcache.tiers.copier import open_copier
from kvcache.tiers.host_pool import HostPool
from kvcache.tiers.mover import Mover, WorkQueue
from wire.records import GroupLayout

OTHER_GROUPS: list[list[str]] = [[], ["window"], ["state"], ["window", "state"]]
"""Kinds of groups that a model may have besides the primary one, in order."""


@dataclass(frozen=True)
class GroupReport:
    """The balance of one more group, in its pages: the same sum as MemoryReport's."""

    total: int
    free: int
    evictable: int
    protected: int
    held: int
    quarantined: int
    pending: int


@dataclass(frozen=True)
class MemoryReport:
    """The balance of a worker's memory, in pages.

    free + evictable + protected + held + quarantined + pending == total. The plain fields are the primary
    group's; `groups` has the others by name.
    """

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
    groups: dict[str, GroupReport] = field(default_factory=dict)


class Memory:
    """Pools, allocators, prefix cache and event recorder. One thread; close it, or use it as a context
    manager."""

    def __init__(
        self,
        config: CacheConfig,
        specs: tuple[GroupSpec, ...],
        req_to_token_pool: ReqToTokenPool,
        allocators: dict[str, BaseTokenToKVPoolAllocator],
        kv_caches: dict[str, KVCache],
        parts: CacheParts,
        recorder: EventRecorder | None,
    ) -> None:
        """`recorder` observes the tree of `parts`; None turns KV events off."""
        self.config = config
        self.specs = specs
        self.page_size = config.page_size
        self.num_pages = config.num_pages
        self.total_tokens = config.num_pages * config.page_size
        self.req_to_token_pool = req_to_token_pool
        self.allocators = allocators
        self.allocator = allocators[specs[0].name]
        self.kv_caches = kv_caches
        self.cache, self.primary, self.swa, self.states, self.tiers, self.promotion = parts
        self._recorder = recorder
        self._quarantine: dict[Hashable, list[GroupPages]] = {}
        self._quarantined_at: dict[Hashable, float] = {}

    def layouts(self) -> tuple[GroupLayout, ...]:
        """For the worker's record."""
        return tuple(spec.to_layout(self.page_size) for spec in self.specs)

    @property
    def host_tokens(self) -> int:
        """The host tier's capacity, in tokens of the primary group; 0 without one."""
        if self.tiers is None:
            return 0
        return self.tiers.host.pool.arenas[self.specs[0].name].num_pages * self.page_size

    def close(self) -> None:
        """Close the tiers and give up the pools' buffers. A tensor over one stays usable."""
        if self.tiers is not None:
            self.tiers.close()
        for pool in self.kv_caches.values():
            pool.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- frees of all groups -----------------------------------------------------------------------

    def free(self, pages: Mapping[str, npt.NDArray[np.integer]]) -> None:
        """Give pages of any groups back, each once."""
        for name, ids in pages.items():
            self.allocators[name].free_page_ids(ids)

    def free_group_begin(self) -> None:
        """Until `free_group_take`, freed pages stay allocated. Evicted pages are free at once."""
        for allocator in self.allocators.values():
            allocator.free_group_begin()

    def free_group_take(self) -> GroupPages:
        """End the group without freeing: its pages are the caller's, to free when nothing reads them."""
        taken = {name: allocator.free_group_take() for name, allocator in self.allocators.items()}
        return {name: pages for name, pages in taken.items() if len(pages)}

    # -- events ------------------------------------------------------------------------------------

    def take_events(self) -> TreeEvents:
        """KV events since the last call; after an overflow, a clear and all that is cached now. Empty when
        events are off."""
        if self._recorder is None:
            return TreeEvents([], [])
        return self._recorder.take_events(self.cache.tree.nodes())

    def snapshot(self) -> TreeSnapshots:
        """All that is cached: what a consumer knows that has read every event taken so far."""
        assert self._recorder is not None, "events are off"
        return self._recorder.snapshot(self.cache.tree.nodes())

    # -- quarantine --------------------------------------------------------------------------------

    def quarantine(self, pages: Mapping[str, npt.NDArray[np.integer]], owner: Hashable) -> None:
        """Keep allocated pages that a remote writer may still write to, until its fence has passed."""
        held: GroupPages = {name: ids.astype(np.int32) for name, ids in pages.items()}
        self._quarantine.setdefault(owner, []).append(held)
        self._quarantined_at.setdefault(owner, time.monotonic())

    def release_quarantine(self, owner: Hashable) -> int:
        """The fence of `owner` has passed: free its pages. Returns how many; 0 for an unknown owner."""
        released = self._quarantine.pop(owner, [])
        self._quarantined_at.pop(owner, None)
        for pages in released:
            self.free(pages)
        return sum(len(ids) for pages in released for ids in pages.values())

    def quarantine_owners(self) -> list[tuple[Hashable, float]]:
        """Who has pages in quarantine, and since when (monotonic)."""
        return list(self._quarantined_at.items())

    def quarantined(self, group: str) -> Pages:
        """All pages of a group that are in quarantine."""
        everyone = (pages.get(group, NO_PAGES) for held in self._quarantine.values() for pages in held)
        return np.concatenate([NO_PAGES, *everyone])

    # -- balance -----------------------------------------------------------------------------------

    def version(self) -> Hashable:
        """Differs when pages, rows or locks have moved since the last call. In rare cases it does not."""
        tree = self.cache.tree
        sizes = [
            (allocator.available_pages(), tree.evictable(name), tree.protected(name))
            for name, allocator in self.allocators.items()
        ]
        return tree.walks, self.req_to_token_pool.available_size(), len(self._quarantine), *sizes

    def check_memory(
        self, held: Mapping[str, Iterable[int]] | None = None, held_rows: Iterable[int] = ()
    ) -> MemoryReport:
        """`check_slices` in one go."""
        return run_through(self.check_slices(held or {}, held_rows))

    def check_slices(
        self, held: Mapping[str, Iterable[int]], held_rows: Iterable[int]
    ) -> Generator[None, None, MemoryReport]:
        """Assert that every page of every group, and every row, has exactly one owner.

        `held` has, by group, the pages outside tree, quarantine and free list: private pages and slots of
        live requests, reservations, deferred frees. The AssertionError names a page that is lost or owned
        twice. Yields after each bounded part of the work; nothing may change before it ends.
        """
        pool = self.req_to_token_pool
        rows = Balance("rows", pool.size, "row")
        yield from rows.add("free", pool.free_rows())
        yield from rows.add("held", np.fromiter(held_rows, np.int64))
        yield from rows.check()
        if self.swa is not None:
            assert not self.swa.end[pool.free_rows()].any(), "a free row holds window pages"
            self.swa.locks.check()
        balances = {
            name: Balance(
                name, allocator.num_pages, "page" if allocator is self.allocator else f"{name} page"
            )
            for name, allocator in self.allocators.items()
        }
        for name, balance in balances.items():
            yield from self._count_uncached(name, balance, held.get(name, ()))
        yield from self.cache.tree.check(lambda name, pages: balances[name].add("cached", pages))
        if self.tiers is not None:
            yield from self.tiers.check(self.cache.tree.nodes())
        for balance in balances.values():
            yield from balance.check()
        reports = {name: self._group_report(name, balance) for name, balance in balances.items()}
        first = reports.pop(self.specs[0].name)
        return MemoryReport(
            page_size=self.page_size,
            total_pages=first.total,
            free_pages=first.free,
            evictable_pages=first.evictable,
            protected_pages=first.protected,
            held_pages=first.held,
            quarantined_pages=first.quarantined,
            pending_pages=first.pending,
            total_rows=pool.size,
            free_rows=pool.available_size(),
            held_rows=rows.size("held"),
            groups=reports,
        )

    def _count_uncached(self, name: str, balance: Balance, held: Iterable[int]) -> Iterator[None]:
        allocator = self.allocators[name]
        for run in (*allocator.free_runs(), allocator.release_pages):
            yield from balance.add("free", run)
        yield from balance.add("pending", allocator.pending_pages())
        yield from balance.add("held", np.fromiter(held, np.int64))
        if self.tiers is not None:
            yield from balance.add("loading", self.tiers.held(name))
        yield from balance.add("quarantined", self.quarantined(name))

    def _group_report(self, name: str, balance: Balance) -> GroupReport:
        tree = self.cache.tree
        evictable, protected = tree.evictable(name), tree.protected(name)
        assert evictable + protected == balance.size("cached"), f"cached pages of {name} are miscounted"
        return GroupReport(
            total=self.allocators[name].num_pages,
            free=balance.size("free"),
            evictable=evictable,
            protected=protected,
            held=balance.size("held") + balance.size("loading"),
            quarantined=balance.size("quarantined"),
            pending=balance.size("pending"),
        )


def build_memory(config: CacheConfig, specs: Sequence[GroupSpec], mover: WorkQueue | None = None) -> Memory:
    """Allocate and connect everything. Raises ConfigError for groups that this memory cannot hold.

    `mover` does the work of the host tier, where there is one; by default it has threads of its own.
    """
    kinds = [spec.kind for spec in specs]
    primary, others = kinds[:1], kinds[1:]
    if primary not in (["full"], ["latent"], ["entries"]) or others not in OTHER_GROUPS:
        raise ConfigError(
            "model",
            f"its KV groups are: {', '.join(kinds) or 'none'}",
            "serve a model of full, latent or compressed attention, with at most one window and one state "
            "group",
        )
    rows = ReqToTokenPool(
        config.max_running_requests, config.max_context_len, config.pre_alloc_size, config.page_size
    )
    allocators = {spec.name: _allocator(config, spec) for spec in specs}
    recorder = None
    if config.events.enable:
        recorder = EventRecorder(config.page_size, config.events.max_queued_events, config.events.secret)
    kv_caches = {spec.name: _pool(config, spec, allocators[spec.name].num_pages) for spec in specs}
    lower = None
    if config.tiers.enabled:
        mover = mover or Mover()
        lower = _lower(config, specs, kv_caches, mover)
    parts = build_prefix_cache(config, specs, allocators, rows, [recorder] if recorder else [], lower)
    return Memory(config, tuple(specs), rows, allocators, kv_caches, parts, recorder)


def _lower(
    config: CacheConfig, specs: Sequence[GroupSpec], pools: Mapping[str, KVCache], mover: WorkQueue
) -> LowerParts:
    """The host tier's parts: pages in one ratio to the device's for all groups, at least one."""
    ratio = config.tiers.ratio
    if config.tiers.size_bytes:
        ratio = config.tiers.size_bytes / max(1, sum(p.num_pages * p.page_bytes for p in pools.values()))
    pages = {name: max(1, int(pool.num_pages * ratio)) for name, pool in pools.items()}
    host = HostPool(
        specs, config.page_size, pages, None if config.device == "cpu" else torch.device(config.device)
    )
    storage = None if config.tiers.storage is None else open_storage(config.tiers.storage)
    if storage is not None:
        storage.register(host.views())
    layouts = [spec.to_layout(config.page_size) for spec in specs]
    return LowerParts(
        host,
        open_copier(pools, host, config.tiers.backup_bytes_per_s),
        mover,
        storage,
        StorageKeys(config.tiers.model_digest, layouts),
    )


def _allocator(config: CacheConfig, spec: GroupSpec) -> BaseTokenToKVPoolAllocator:
    if isinstance(spec, StateGroupSpec):
        config.check_track_interval()
        return TokenToKVPoolAllocator(config.num_state_slots, config.need_sort)
    pages = config.num_pages if spec.window is None else config.window_pages(spec.window, spec.window_ratio)
    return make_allocator(pages, config.page_size, config.need_sort)


def _pool(config: CacheConfig, spec: GroupSpec, pages: int) -> KVCache:
    ranks = config.rank_devices
    if ranks and not (isinstance(spec, KVGroupSpec) and one_memory(ranks)):
        return _spread_pool(config, spec, pages)
    nbytes = KVCache.bytes_needed(spec, pages, config.page_size)
    buffer = _buffer(config, nbytes) if nbytes else None
    return open_pool(spec, pages, config.page_size, config.device, buffer)


def one_memory(devices: Sequence[str]) -> bool:
    """Whether ranks on these devices all reach the same memory: keys and values are then in one pool, in
    which each has its heads."""
    return set(devices) == {"cpu"}


def _spread_pool(config: CacheConfig, spec: GroupSpec, pages: int) -> SpreadKVCache:
    own = rank_spec(spec, len(config.rank_devices))
    parts: list[KVCache] = []
    try:
        for device in config.rank_devices:
            parts.append(_pool(replace(config, device=device, rank_devices=(), shared=True), own, pages))
            if parts[-1].fd is None and parts[-1].page_bytes:
                raise ConfigError(
                    "tp_size",
                    f"memory of {device} cannot be shared between processes",
                    "see the log for the reason, or use 1",
                )
    except ConfigError:
        for pool in parts:
            pool.close()
        raise
    return pool_of_parts(spec, parts)


def _buffer(config: CacheConfig, nbytes: int) -> PoolBuffer | None:
    """The memory of a pool. None: torch's allocator has it on the device."""
    if config.device == "cpu":
        return allocate_shared(nbytes) if config.shared else allocate_private(nbytes)
    return allocate_exported(torch.device(config.device), nbytes) if config.shared else None
