"""Options that concern tenants: shares of KV memory."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator, model_validator

from common.errors import ConfigError
from common.options import Options
from kvcache.shares.config import SharesConfig, TenantShare


class TenantShareOptions(Options):
    """A tenant's part of each worker's KV memory (docs/decisions/0060-tenant-shares.md)."""

    min_share: float = Field(
        TenantShare.min_share, ge=0, le=1, description="pages up to this part are evicted last"
    )
    max_share: float = Field(
        TenantShare.max_share, ge=0, le=1, description="beyond this part the tenant's own oldest pages go"
    )

    def share(self) -> TenantShare:
        """Raises ConfigError for what cannot be."""
        return TenantShare(self.min_share, self.max_share)

    @model_validator(mode="after")
    def _in_order(self) -> TenantShareOptions:
        if self.min_share > self.max_share:
            raise ValueError(f"min_share {self.min_share:g} is above max_share {self.max_share:g}")
        return self


class TenantSharesOptions(Options):
    """Shares of KV memory by tenant."""

    tenants: dict[str, TenantShareOptions] = Field(
        {}, description="shares by tenant; the name '' is for requests without a tenant and for public pages"
    )
    tenant_defaults: TenantShareOptions = Field(
        TenantShareOptions(), description="the share of each tenant that `tenants` does not name, but for ''"
    )

    def shares(self) -> SharesConfig:
        """Raises ConfigError if more is guaranteed than there is."""
        named = {tenant: options.share() for tenant, options in self.tenants.items()}
        return SharesConfig(named, self.tenant_defaults.share())

    @field_validator("tenants")
    @classmethod
    def _fit(cls, value: dict[str, TenantShareOptions]) -> dict[str, TenantShareOptions]:
        check_shares(value)
        return value


def check_shares(tenants: Mapping[str, TenantShareOptions]) -> None:
    """Raises ValueError if more is guaranteed to the tenants together than there is."""
    try:
        SharesConfig({tenant: options.share() for tenant, options in tenants.items()})
    except ConfigError as error:
        raise ValueError(f"{error.problem}: {error.remedy}") from None
