"""The one place where a configuration becomes a prefix cache, and the allocators that evict from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcache.allocator import BaseTokenToKVPoolAllocator
from kvcache.base_prefix_cache import BasePrefixCache
from kvcache.chunk_cache import ChunkCache
from kvcache.components.base import TreeComponent
from kvcache.components.full import FullComponent
from kvcache.components.holdings import GroupHoldings
from kvcache.components.state import StateComponent, StateHoldings
from kvcache.components.window import WindowComponent, WindowHoldings
from kvcache.config import CacheConfig
from kvcache.group_allocator import GroupAllocator
from kvcache.layout import GroupSpec
from kvcache.observer import TreeObserver
from kvcache.pool import ReqToTokenPool
from kvcache.radix_cache import RadixCache
from kvcache.radix_tree import RadixTree
from kvcache.shares.pages import TenantPages
from kvcache.storage.backend import StorageBackend
from kvcache.storage.keys import StorageKeys
from kvcache.swa_allocator import SWATokenToKVPoolAllocator, window_tail
from kvcache.tenancy.promotion import Promotion
from kvcache.tiers.backlog import StorageBacklog
from kvcache.tiers.copier import Copier
from kvcache.tiers.host_parts import FullHostPart, HostPart, StateHostPart, WindowHostPart
from kvcache.tiers.host_pool import HostPool
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.mover import WorkQueue
from kvcache.tiers.moves import TierMoves
from kvcache.tiers.reads import TierReads
from kvcache.tiers.storage_tier import StorageTier
from kvcache.tiers.tiers import Tiers
from kvcache.window_locks import WindowLocks


class LowerParts(NamedTuple):
    """What the host tier is made of."""

    pool: HostPool
    copier: Copier
    mover: WorkQueue
    storage: StorageBackend | None
    keys: StorageKeys


class CacheParts(NamedTuple):
    """A prefix cache and what live requests allocate from, by group."""

    cache: BasePrefixCache
    primary: GroupAllocator
    swa: SWATokenToKVPoolAllocator | None  # of the window group, where there is one
    states: GroupAllocator | None  # of the state group, where there is one
    tiers: Tiers | None  # below the device
    promotion: Promotion | None  # where tenants share pages


def build_prefix_cache(
    config: CacheConfig,
    specs: Sequence[GroupSpec],
    allocators: Mapping[str, BaseTokenToKVPoolAllocator],
    pool: ReqToTokenPool,
    observers: Sequence[TreeObserver] = (),
    lower: LowerParts | None = None,
) -> CacheParts:
    """A RadixCache, or a ChunkCache when prefix caching is off. CacheConfig has checked the names. `lower` is
    what a host tier is made of, for a RadixCache.

    What evicts is built before what allocates: components, then the tree, then the groups' allocators on it,
    then what requests hold, then the cache.
    """
    primary, policy, page_size = specs[0].name, config.eviction_policy, config.page_size
    window = next((spec.window for spec in specs if spec.window), None)
    # What tenants have is counted where it matters for eviction; elsewhere it would cost time.
    counts = config.tenancy.enabled or config.shares.enabled
    tenants = {
        name: TenantPages(config.shares, allocator.num_pages) if counts else None
        for name, allocator in allocators.items()
    }
    components: list[TreeComponent] = [FullComponent(primary, allocators[primary], policy, tenants[primary])]
    parts: list[HostPart] = [FullHostPart(components[0])]
    locks: WindowLocks | None = None
    if window is not None:
        locks = WindowLocks(allocators["window"].num_pages, policy, tenants["window"])
        tail = window_tail(window, page_size)
        components.append(WindowComponent(allocators["window"], locks, tail, tenants["window"]))
        parts.append(WindowHostPart(components[-1], locks, tail))
    if "state" in allocators:
        components.append(StateComponent(allocators["state"], policy, tenants["state"]))
        parts.append(StateHostPart(components[-1]))

    is_radix = config.prefix_cache == "radix"
    host: HostTier | None = None
    backlog: StorageBacklog | None = None
    if lower is not None:
        assert is_radix, "a host tier without a radix cache"
        write_back = lower.copier if config.tiers.write_policy == "write_back" else None
        backlog = StorageBacklog() if lower.storage is not None else None
        host = HostTier(lower.pool, parts, observers, page_size, policy, write_back, backlog)
    tree = RadixTree(page_size, components if is_radix else (), observers, host, config.tenancy.enabled)
    promotion = Promotion(tree, config.tenancy) if config.tenancy.enabled else None

    groups = {name: GroupAllocator(name, allocator, tree) for name, allocator in allocators.items()}
    swa: SWATokenToKVPoolAllocator | None = None
    states = groups.get("state")
    holdings: list[GroupHoldings] = []
    if window is not None and locks is not None:
        swa = SWATokenToKVPoolAllocator(groups["window"], locks, window, pool.size, config.max_context_len)
        holdings.append(WindowHoldings(swa))
    if states is not None:
        holdings.append(StateHoldings(states, page_size))

    tiers: Tiers | None = None
    if lower is not None and host is not None:
        moves = TierMoves(config.tiers, tree, host, groups, lower.copier, lower.mover)
        storage: StorageTier | None = None
        if lower.storage is not None and backlog is not None:
            storage = StorageTier(
                config.tiers, tree, host, lower.mover, lower.storage, lower.keys, backlog, promotion=promotion
            )
        tiers = Tiers(host, moves, TierReads(tree, host), storage, lower.mover)
    cache: BasePrefixCache = ChunkCache(pool, allocators[primary], tree, holdings)
    if is_radix:
        cache = RadixCache(
            pool, allocators[primary], tree, holdings, tiers.moves if tiers else None, promotion
        )
    return CacheParts(cache, groups[primary], swa, states, tiers, promotion)
