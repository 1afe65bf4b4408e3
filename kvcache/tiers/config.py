"""Configuration of the tiers below the device. The options have SGLang's names."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


@dataclass(frozen=True)
class TierConfig:
    """The host tier: its size, and when pages go there. Without a size there is none."""

    ratio: float = 0.0  # host pages of each group for one device page
    size_bytes: int = 0  # of all groups together; takes the place of `ratio`
    write_policy: str = "write_through"
    load_back_threshold: int = 10  # tokens: fewer are computed again rather than loaded
    pace_bytes_per_s: float = 0.0  # of backups; 0: as fast as memory

    def __post_init__(self) -> None:
        if self.write_policy not in WRITE_POLICIES:
            raise ConfigError(
                "hicache_write_policy",
                f"{self.write_policy!r} is unknown",
                f"use one of {', '.join(WRITE_POLICIES)}",
            )
        for option, value in (("hicache_ratio", self.ratio), ("hicache_size", self.size_bytes)):
            if value < 0:
                raise ConfigError(option, f"{value} is negative", "give 0 for no host tier, or more")

    @property
    def enabled(self) -> bool:
        """Whether there is a host tier."""
        return bool(self.ratio or self.size_bytes)
