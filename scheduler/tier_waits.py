"""TierWaits: requests that wait for what lower tiers have of their prompts."""

from __future__ import annotations

from kvcache.base_prefix_cache import MatchResult
from kvcache.radix_key import RadixKey
from kvcache.tiers.tiers import Tiers
from kvcache.tree_node import TreeNode
from scheduler.rates import Rates
from scheduler.req import Req


class TierWaits:
    """Without lower tiers no request waits."""

    def __init__(self, tiers: Tiers | None, rates: Rates) -> None:
        self._tiers = tiers
        self._rates = rates

    def poll(self) -> bool:
        """Let what has moved enter the tree. Whether there was anything."""
        return self._tiers is not None and self._tiers.poll()

    @property
    def is_on(self) -> bool:
        """Whether there are lower tiers."""
        return self._tiers is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves."""
        return self._tiers is None or self._tiers.is_idle

    @property
    def will_free(self) -> bool:
        """Whether a copy or a read is under way that has pages of the device until it ends."""
        return self._tiers is not None and self._tiers.uses_device

    def prefetch(self, req: Req, key: RadixKey) -> None:
        """Begin to read what storage has of `key` if computing it should take longer, unless this request's
        read has begun already."""
        if self._tiers is not None and self._tiers.storage is not None and not req.needs_all:
            rate = self._rates.prefill_tokens_per_s
            self._tiers.storage.prefetches.prefetch((req.room, req.epoch), key, rate)

    def awaits_storage(self, req: Req) -> bool:
        """Whether the request still waits for its read."""
        if self._tiers is None or self._tiers.storage is None:
            return False
        return self._tiers.storage.prefetches.waits((req.room, req.epoch))

    def wants(self, match: MatchResult) -> bool:
        """Whether to load what the host has of a match."""
        return self._tiers is not None and self._tiers.moves.loads.wants(match)

    def brings_back(self, req: Req, match: MatchResult, fits: bool) -> bool:
        """Whether the request must wait while that is loaded. `fits`: there is memory for the request."""
        user = (req.room, req.epoch)
        if self._tiers is None or not self._tiers.moves.loads.bring_back(user, match, fits):
            return False
        req.sources.host = max(req.sources.host, match.host_hit_length)
        return True

    def brings_ahead(self, req: Req, match: MatchResult) -> None:
        """Load that before the request's turn, if it is much."""
        if self._tiers is not None and self._tiers.moves.loads.wants(match):
            self._tiers.moves.loads.bring_ahead((req.room, req.epoch), match)
            if self.loaded_pages(req):
                req.sources.host = max(req.sources.host, match.host_hit_length)

    def loaded_pages(self, req: Req) -> int:
        """Pages of the request's prompt that are not free, because they are loaded for it or will be."""
        return 0 if self._tiers is None else self._tiers.moves.loads.loaded_pages((req.room, req.epoch))

    def makes_room(self) -> bool:
        """Memory is short. Whether some can be evicted now that was loaded for requests which wait."""
        return self._tiers is not None and self._tiers.moves.loads.make_room()

    def found(self, req: Req) -> None:
        """The request has locked what was loaded for it, or has no use for it."""
        if self._tiers is not None:
            self._tiers.moves.loads.release((req.room, req.epoch))

    def admitted(self, req: Req, node: TreeNode | None) -> None:
        """The request has found what ends at `node`, and waits for nothing any more. If it has run before,
        what it found may be its own."""
        self.forget(req)
        if self._tiers is not None and node is not None and not req.resumed:
            self._tiers.moves.consider(node.path(), is_found=True)

    def forget(self, req: Req) -> None:
        """The request waits for nothing any more."""
        if self._tiers is None:
            return
        user = (req.room, req.epoch)
        if self._tiers.storage is not None:
            req.sources.storage = max(req.sources.storage, self._tiers.storage.prefetches.arrived(user))
        self._tiers.forget(user)
