"""Configuration of the tiers below the device. The options have SGLang's names."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from kvcache.storage.config import StorageConfig

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")


@dataclass(frozen=True)
class TierConfig:
    """The host tier: its size, and when pages go there. Without a size there is none."""

    ratio: float = 0.0  # host pages of each group for one device page
    size_bytes: int = 0  # of all groups together; takes the place of `ratio`
    write_policy: str = "write_through"
    decode_offload_tokens: int = 256  # of an answer, whole pages: then they go down; 0: when it has ended
    load_back_threshold: int = 10  # tokens: fewer are computed again rather than loaded
    pace_bytes_per_s: float = 0.0  # of backups; 0: as fast as memory
    storage: StorageConfig | None = None  # None: no storage tier
    model_digest: bytes = b""  # names the model in storage (engine/model_digest.py)
    prefetch_policy: str = "timeout"  # how long a request waits for what storage has of its prompt
    prefetch_threshold: int = 256  # tokens: fewer are not read
    prefetch_if_slower: bool = False  # read also what would be computed sooner
    prefetch_base_s: float = 1.0  # of the policy timeout
    prefetch_s_per_1024_tokens: float = 0.25
    prefetch_max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.write_policy not in WRITE_POLICIES:
            raise ConfigError(
                "hicache_write_policy",
                f"{self.write_policy!r} is unknown",
                f"use one of {', '.join(WRITE_POLICIES)}",
            )
        if self.prefetch_policy not in PREFETCH_POLICIES:
            raise ConfigError(
                "hicache_storage_prefetch_policy",
                f"{self.prefetch_policy!r} is unknown",
                f"use one of {', '.join(PREFETCH_POLICIES)}",
            )
        if self.storage is not None and not self.enabled:
            raise ConfigError("hicache_storage_backend", "there is no host tier", "give hicache_ratio")
        for option, value in (("hicache_ratio", self.ratio), ("hicache_size", self.size_bytes)):
            if value < 0:
                raise ConfigError(option, f"{value} is negative", "give 0 for no host tier, or more")

    @property
    def enabled(self) -> bool:
        """Whether there is a host tier."""
        return bool(self.ratio or self.size_bytes)

    @property
    def backup_bytes_per_s(self) -> float:
        """The pace of backups; 0: none. An eviction that waits for its copy has none: no forward runs
        meanwhile."""
        return 0.0 if self.write_policy == "write_back" else self.pace_bytes_per_s
