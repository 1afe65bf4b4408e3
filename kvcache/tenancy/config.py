"""Configuration of what tenants share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from common.errors import ConfigError


@dataclass(frozen=True)
class TenancyConfig:
    """When pages that several tenants have computed become public. Without users they never do."""

    users: int = 0  # K: at least so many tenants must have the same pages; 0: each keeps its own
    epoch_s: float = 60.0  # how often pages become public
    burst: int = 64  # guesses of one tenant in an epoch that demote nothing yet; 0: nothing is demoted
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)  # draws thresholds

    def __post_init__(self) -> None:
        if self.users < 0 or self.users == 1:
            raise ConfigError(
                "sharing_min_tenants", f"{self.users} cannot be", "give 0 for no sharing, or 2 or more"
            )
        if self.burst < 0:
            raise ConfigError(
                "sharing_burst", "is negative", "give requests of an epoch, or 0 for no demotion"
            )
        if self.epoch_s <= 0:
            raise ConfigError("sharing_epoch_s", "is not positive", "give seconds")

    @property
    def enabled(self) -> bool:
        """Whether anything becomes public."""
        return self.users > 0
