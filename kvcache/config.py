"""Configuration of the KV cache and of KV events."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import ConfigError
from common.ports import ANY_PORT, Ports
from common.secrets import ClusterSecret
from kvcache.eviction import eviction_policy
from kvcache.layout import GroupSpec
from kvcache.shares.config import SharesConfig
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers.config import TierConfig

PREFIX_CACHES = ("radix", "none")
MIN_STATE_SLOTS = 3  # one request's pair, and a spare for the one that the tree takes


@dataclass(frozen=True)
class KVEventsConfig:
    """Whether and how the worker publishes what it caches."""

    enable: bool = False
    topic: str = "kv-events"
    interface: str = "127.0.0.1"  # sockets bind to it
    ports: Ports = ANY_PORT
    buffer_batches: int = 10_000  # kept for replay
    buffer_bytes: int = 256 << 20  # of these, of each of the two streams
    max_queued_events: int = 100_000  # of a socket, recorded but not taken; a snapshot replaces more
    secret: ClusterSecret | None = None  # of the names of private pages

    def __post_init__(self) -> None:
        for name in ("buffer_batches", "buffer_bytes", "max_queued_events"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv_events_config.{name}", "is not positive", "give at least 1")


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and choices of one worker's memory. Raises ConfigError for what cannot work."""

    total_tokens: int  # KV capacity; rounded down to whole pages
    max_context_len: int  # longest prompt + output of one request
    max_running_requests: int
    page_size: int = 16  # tokens, a power of two
    pre_alloc_size: int = 0  # additional rows, for requests whose KV is still arriving (decode)
    device: str = "cpu"
    rank_devices: tuple[str, ...] = ()  # of a worker of several ranks; `device` is the first
    shared: bool = False  # other processes can map the pools: memfds; on a GPU, if its memory can be shared
    prefix_cache: str = "radix"
    eviction_policy: str = "lru"
    need_sort: bool = False  # hand out freed pages in ascending order: longer runs for transfers
    window_tokens: int | None = None  # capacity of the window group; None: `window_pages` chooses
    swa_full_tokens_ratio: float | None = (
        None  # window capacity as a share of total_tokens; None: by the group
    )
    max_chunk_tokens: int | None = None  # longest prefill chunk; None: a prompt may come in one
    state_slots: int | None = None  # slots of the state group; None: `num_state_slots` chooses
    mamba_track_interval: int = 256  # tokens between the states that decode keeps; whole pages
    events: KVEventsConfig = field(default_factory=KVEventsConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    tenancy: TenancyConfig = field(default_factory=TenancyConfig)
    shares: SharesConfig = field(default_factory=SharesConfig)

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(
                "page_size", f"{self.page_size} is not a power of two", "use 1, 2, 4, 8, 16, 32, ..."
            )
        if self.prefix_cache not in PREFIX_CACHES:
            raise ConfigError(
                "prefix_cache", f"{self.prefix_cache!r} is unknown", f"use one of {', '.join(PREFIX_CACHES)}"
            )
        if self.tiers.enabled and self.prefix_cache != "radix":
            raise ConfigError("hicache_ratio", "there is no prefix cache", "use prefix_cache radix")
        eviction_policy(self.eviction_policy)
        if self.max_running_requests < 1 or self.pre_alloc_size < 0:
            raise ConfigError("max_running_requests", "is not positive", "give at least 1")
        if not self.num_pages:
            raise ConfigError(
                "max_total_tokens",
                f"{self.total_tokens} are less than a page",
                f"give {self.page_size} or more",
            )
        if not 1 <= self.max_context_len <= self.num_pages * self.page_size:
            raise ConfigError(
                "max_context_tokens",
                f"a context of {self.max_context_len} tokens does not fit a pool of {self.total_tokens}",
                "lower max_context_tokens or raise max_total_tokens",
            )
        if self.swa_full_tokens_ratio is not None and not 0 < self.swa_full_tokens_ratio <= 1:
            raise ConfigError("swa_full_tokens_ratio", "is not in (0, 1]", "give a share of max_total_tokens")
        if self.state_slots is not None and self.state_slots < MIN_STATE_SLOTS:
            raise ConfigError(
                "max_mamba_cache_size", "is too small for one request", f"give at least {MIN_STATE_SLOTS}"
            )

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return self.total_tokens // self.page_size

    @property
    def num_state_slots(self) -> int:
        """Slots of a state group: a pair for each request, and as many for cached states."""
        if self.state_slots is not None:
            return self.state_slots
        return max(MIN_STATE_SLOTS, 4 * self.max_running_requests + 2 * self.pre_alloc_size)

    def window_pages(self, window: int, ratio: float = GroupSpec.window_ratio) -> int:
        """Pages of a window group of `window` tokens; `ratio`: the group's own. Raises ConfigError if one
        request would not fit."""
        chunk = self.max_chunk_tokens or self.max_context_len
        one_request = min(
            -(-(window + chunk) // self.page_size) + 2, -(-self.max_context_len // self.page_size)
        )
        if self.window_tokens is None:
            share = self.swa_full_tokens_ratio or ratio
            return min(self.num_pages, max(one_request, int(self.num_pages * share)))
        if self.window_tokens // self.page_size < one_request:
            raise ConfigError(
                "window_tokens",
                f"{self.window_tokens} do not hold one request's window and prefill chunk",
                f"give at least {one_request * self.page_size}",
            )
        return min(self.num_pages, self.window_tokens // self.page_size)

    def check_track_interval(self) -> None:
        """Raises ConfigError unless states are kept at page borders; for models with a state group."""
        if self.mamba_track_interval < 1 or self.mamba_track_interval % self.page_size:
            raise ConfigError(
                "mamba_track_interval",
                f"{self.mamba_track_interval} is not a multiple of page_size, {self.page_size}",
                "give whole pages",
            )
