"""The one place where a configuration becomes a prefix cache."""

from __future__ import annotations

from kvcache.allocator import BaseTokenToKVPoolAllocator
from kvcache.base_prefix_cache import BasePrefixCache
from kvcache.chunk_cache import ChunkCache
from kvcache.components.base import TreeComponent
from kvcache.components.state import StateComponent
from kvcache.components.window import WindowComponent
from kvcache.config import CacheConfig
from kvcache.events import EventRecorder
from kvcache.pool import ReqToTokenPool
from kvcache.radix_cache import RadixCache
from kvcache.state_slots import StateSlotPool
from kvcache.swa_allocator import SWATokenToKVPoolAllocator


def build_prefix_cache(
    config: CacheConfig,
    req_to_token_pool: ReqToTokenPool,
    allocator: BaseTokenToKVPoolAllocator,
    swa: SWATokenToKVPoolAllocator | None = None,
    states: StateSlotPool | None = None,
) -> BasePrefixCache:
    """RadixCache, or ChunkCache when prefix caching is off. CacheConfig has checked the names."""
    if config.prefix_cache == "none":
        return ChunkCache(req_to_token_pool, allocator, swa, states)
    recorder = (
        EventRecorder(config.page_size, config.events.max_queued_events) if config.events.enable else None
    )
    components: list[TreeComponent] = []
    if swa is not None:
        components.append(WindowComponent(swa, config.eviction_policy))
    if states is not None:
        components.append(StateComponent(states, config.page_size, config.eviction_policy))
    return RadixCache(
        req_to_token_pool, allocator, config.eviction_policy, recorder, components, swa=swa, states=states
    )
