"""GroupHoldings: what live requests hold of a KV group besides the primary one, and give the tree of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvcache.allocator import Pages
from kvcache.request import CachedRequest


class GroupHoldings(ABC):
    """One group, all requests."""

    name: str
    """The group's name."""

    @abstractmethod
    def insertable(self, req: CachedRequest, length: int) -> int:
        """The longest length, at most `length` tokens, up to which the request can be cached; 0 if none."""

    def make_room(self, ends: bool) -> None:
        """Evict now what the next `offer` would evict: that one then changes nothing in the tree."""
        del ends

    @abstractmethod
    def offer(self, req: CachedRequest, length: int, ends: bool) -> Pages | None:
        """What the request gives the tree up to `length` tokens; None if that is impossible now.

        A request that continues (`ends` is false) keeps all that it needs.
        """

    @abstractmethod
    def adopt(self, req: CachedRequest, cached: Pages) -> None:
        """The tree has taken what it lacked of the offer. From now on the request uses the tree's pages
        `cached`, which are locked for it."""

    @abstractmethod
    def release(self, req: CachedRequest) -> None:
        """Free and unlock all that the request holds of this group."""

    def cut_points(self, req: CachedRequest, total: int) -> Iterable[int]:
        """Lengths below `total` tokens at which this group wants a forward to end."""
        del req, total
        return ()
