"""TenantLabels: what metrics call tenants, so that however many there are, there are few series."""

from __future__ import annotations

from collections.abc import Iterable

ANONYMOUS = "anonymous"
OTHER = "other"
MOST_LABELS = 32


class TenantLabels:
    """Named tenants have labels, and then who comes first, `most` in all. Requests without a tenant are
    ANONYMOUS, all others OTHER. One thread."""

    def __init__(self, named: Iterable[str] = (), most: int = MOST_LABELS) -> None:
        self._most = most
        self._labels = {"": ANONYMOUS}
        for tenant in named:
            self.of(tenant)

    def of(self, tenant: str) -> str:
        """The tenant's label. It stays the same."""
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) > self._most:
                return OTHER
            label = self._labels[tenant] = tenant
        return label
