"""The room's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.eviction import eviction_policy
from wire.errors import ConfigError

PREFIX_CACHES = ("radix", "none")


@dataclass(frozen=True)
class KVEventsConfig:
    """Whether and how the worker publishes what it caches. The cluster's secret is given when opening."""

    enable: bool = False
    topic: str = "kv-events"
    interface: str = "127.0.0.1"  # sockets bind fresh ports on it
    buffer_batches: int = 10_000  # kept for replay
    max_queued_events: int = 100_000  # recorded but not taken; beyond it a snapshot replaces them

    def __post_init__(self) -> None:
        for name in ("buffer_batches", "max_queued_events"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv_events_config.{name}", "is not positive", "give at least 1")


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and choices of one worker's memory. Raises ConfigError for what cannot work."""

    total_tokens: int  # KV capacity; rounded down to whole pages
    max_context_len: int  # longest prompt + output of one request
    max_running_requests: int
    page_size: int = 16  # tokens, a power of two
    pre_alloc_size: int = 0  # rows more, for requests whose KV is still arriving (decode)
    device: str = "cpu"
    shared: bool = False  # the pool is a memfd that other processes can map
    prefix_cache: str = "radix"
    eviction_policy: str = "lru"
    need_sort: bool = False  # hand out freed pages in ascending order: longer runs for transfers
    events: KVEventsConfig = field(default_factory=KVEventsConfig)

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(
                "page_size", f"{self.page_size} is not a power of two", "use 1, 2, 4, 8, 16, 32, ..."
            )
        if self.prefix_cache not in PREFIX_CACHES:
            raise ConfigError(
                "prefix_cache", f"{self.prefix_cache!r} is unknown", f"use one of {', '.join(PREFIX_CACHES)}"
            )
        eviction_policy(self.eviction_policy)
        if self.max_running_requests < 1 or self.pre_alloc_size < 0:
            raise ConfigError("max_running_requests", "is not positive", "give at least 1")
        if self.shared and self.device != "cpu":
            raise ConfigError("device", f"a pool on {self.device} cannot be a memfd", "set shared to false")
        if not 1 <= self.max_context_len <= self.num_pages * self.page_size:
            raise ConfigError(
                "max_context_tokens",
                f"a context of {self.max_context_len} tokens does not fit a pool of {self.total_tokens}",
                "lower max_context_tokens or raise max_total_tokens",
            )

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return self.total_tokens // self.page_size
