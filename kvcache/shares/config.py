"""Configuration of the tenants' shares of KV memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.errors import ConfigError
from wire.page_hash import tenant_of_key
from wire.request import NOBODY


@dataclass(frozen=True)
class TenantShare:
    """Parts of the pages of each KV group. Raises ConfigError for what cannot be."""

    min_share: float = 0.0  # of cached pages, what goes last
    max_share: float = 1.0  # of cached pages, what the tenant may have

    def __post_init__(self) -> None:
        for name in ("min_share", "max_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"tenants.{name}", "is not in [0, 1]", "give a part of the KV memory")
        if self.min_share > self.max_share:
            raise ConfigError("tenants.min_share", "is above max_share", "lower it, or raise max_share")


@dataclass(frozen=True)
class SharesConfig:
    """Shares by tenant. The tenant "" is requests without a tenant, and public pages where tenants share:
    `others` does not hold for it. Raises ConfigError if more is guaranteed than there is."""

    named: Mapping[str, TenantShare] = field(default_factory=dict)
    others: TenantShare = TenantShare()  # of each tenant that is not named

    def __post_init__(self) -> None:
        total = sum(share.min_share for share in self.named.values())
        if total > 1:
            raise ConfigError(
                "tenants", f"min_share of all of them is {total:g} together", "lower them to at most 1"
            )

    @property
    def enabled(self) -> bool:
        """Whether any tenant is treated differently from what happens without shares."""
        return any(share != TenantShare() for share in (*self.named.values(), self.others))

    def of(self, tenant: str) -> TenantShare:
        """The share of a tenant, given by its key string (wire/page_hash.py)."""
        is_named = bool(tenant) and not tenant.startswith(NOBODY)
        return self.named.get(tenant_of_key(tenant)[0], self.others if is_named else TenantShare())
