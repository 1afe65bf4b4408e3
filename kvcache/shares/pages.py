"""TenantPages: how many pages of a group each tenant has on the tree, and what that means for eviction."""

from __future__ import annotations

from enum import IntEnum

from kvcache.shares.config import SharesConfig


class Rank(IntEnum):
    """What evicting some pages of a tenant would do to its share. The lowest rank is evicted first."""

    EXCESS = 0  # the tenant has more than its max_share
    SPARE = 1  # it keeps its min_share without them
    BORDER = 2  # it has more than its min_share, and less without them
    GUARANTEED = 3  # it has no more than its min_share


class TenantPages:
    """One group, all tenants. Components call `add`, the evictor reads. Locked pages count like others."""

    def __init__(self, shares: SharesConfig, num_pages: int) -> None:
        """`num_pages`: of the group, of which the shares are parts."""
        self.held: dict[str, int] = {}  # of tenants that have any
        self.excessive: dict[str, None] = {}  # tenants above their max_share
        self._shares = shares
        self._num_pages = num_pages

    def add(self, tenant: str, pages: int) -> None:
        """The tenant has so many pages more, or fewer."""
        held = self.held.get(tenant, 0) + pages
        assert held >= 0, f"tenant {tenant!r} has {held} pages"
        if held:
            self.held[tenant] = held
        else:
            self.held.pop(tenant, None)
        if held > self._most(tenant):
            self.excessive[tenant] = None
        else:
            self.excessive.pop(tenant, None)

    def rank(self, tenant: str, pages: int) -> Rank:
        """What evicting this many pages of the tenant would mean."""
        held, least = self.held.get(tenant, 0), int(self._shares.of(tenant).min_share * self._num_pages)
        if tenant in self.excessive:
            return Rank.EXCESS
        if held - pages >= least:
            return Rank.SPARE
        return Rank.BORDER if held > least else Rank.GUARANTEED

    def excess(self, tenant: str) -> int:
        """Pages that the tenant has beyond its max_share."""
        return max(0, self.held.get(tenant, 0) - self._most(tenant))

    def _most(self, tenant: str) -> int:
        return int(self._shares.of(tenant).max_share * self._num_pages)
