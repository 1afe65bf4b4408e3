"""Prefetches: what a request's prompt has in storage, read into host pages while the request waits.

A prefetch asks first what is there (stored_way.py), then takes host pages for it, and reads. It ends where
every group can continue: of a window group the last window is read, of a state group the state there. Of two
requests of one tenant that lack the same page first, the second shares the first one's if that brings all it
wants; else it has its own after that. What has arrived enters the tree (arrivals.py) and stays on the host
until the requests have their turn. What would be computed sooner is not read, but for a trial now and then,
for which no request waits. While the reads stand still, nothing new is read. The backend is called on the
mover's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from kvcache.allocator import Pages
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.storage.backend import StorageBackend
from kvcache.storage.keys import StorageKeys
from kvcache.tenancy.promotion import Promotion
from kvcache.tiers.arrivals import StorageArrivals, public_key
from kvcache.tiers.config import TierConfig
from kvcache.tiers.host_pool import HostPool
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.mover import WorkQueue
from kvcache.tiers.prefetch import Place, Prefetch, PrefetchWish, StorageCounts
from kvcache.tiers.prefetch_steps import PrefetchSteps
from kvcache.tiers.read_lane import ReadLane
from kvcache.tiers.read_times import ReadTimes
from kvcache.tiers.stored_way import Begins, StoredNames, StoredWay
from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest, page_digests

_HOST_SHARE = 2
"""What is read for requests that wait takes one page in so many of the host's, but for a single long one."""


class Prefetches:
    """One worker's. All methods are called on the tree's thread."""

    def __init__(
        self,
        config: TierConfig,
        tree: RadixTree,
        host: HostTier,
        mover: WorkQueue,
        backend: StorageBackend,
        keys: StorageKeys,
        counts: StorageCounts,
        clock: Callable[[], float],
        promotion: Promotion | None,
    ) -> None:
        """`promotion` is told of new public nodes, where tenants share."""
        self._config = config
        self._tree = tree
        self._host = host
        self._pool: HostPool = host.pool
        self._keys = keys
        self._counts = counts
        self._clock = clock
        self._lane = ReadLane(mover, clock)
        self._steps = PrefetchSteps(
            host,
            self._lane,
            backend,
            StorageArrivals(tree, host, promotion),
            counts,
            clock,
            tree.page_size,
            self._is_much,
            self._end,
        )
        self._promotion = promotion
        self._times = ReadTimes()
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._prefetches: dict[Place, Prefetch] = {}
        self._of: dict[Hashable, Prefetch] = {}  # by user
        self._behind: dict[Hashable, PrefetchWish] = {}  # by user: each waits for the prefetch at its place
        self._refused: set[Hashable] = set()  # users whose prefetch would not have paid

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._prefetches)

    def prefetch(self, user: Hashable, key: RadixKey, tokens_per_s: float = 0.0) -> bool:
        """Begin to read what the tree lacks of `key`, if that should pay. Whether it has begun. `key` has
        what a match may use, and computing it takes `tokens_per_s`, 0 if that is not known. A user that asks
        again has what it had, and a refusal holds until it is forgotten."""
        if user in self._behind:
            return True
        if user in self._of or user in self._refused:
            return user not in self._refused and not self._of[user].is_over
        return self._begin(PrefetchWish(user, key, tokens_per_s))

    def _begin(self, wish: PrefetchWish) -> bool:
        """Begin to read it, or share another's read, or queue it behind that."""
        key, size = wish.key, self._tree.page_size
        begins = self._begins(key)
        cached, total = begins.own, len(key) // size
        tokens = (total - cached) * size
        # What was demoted lies there still, under public names.
        is_withheld = self._promotion is not None and self._promotion.demotion.withholds(key)
        if tokens < max(1, self._config.prefetch_threshold) or (is_withheld and not key.tenant):
            return False
        if self._lane.stands:
            return self._refuse(wish.user)
        bound_s, now = self._bound_s(total - cached), self._clock()
        wish.digests = wish.digests or _digests(key, total * size, size)
        wish.deadline = wish.deadline or now + bound_s
        wish.place = place = (key.tenant, wish.digests[cached])
        is_trial = not self._pays(tokens, wish.tokens_per_s)
        same = self._prefetches.get(place)
        if same is not None and not same.serves(wish.digests):
            if is_trial:
                return self._refuse(wish.user)
            self._behind[wish.user] = wish
            return True
        if same is None:
            if is_trial and not self._times.try_again(now):
                return self._refuse(wish.user)
            public = total if self._tree.shares or not key.tenant else key.public_pages(size)
            public = 0 if is_withheld else min(public, total)
            stored = StoredNames(self._keys, list(self._parts), wish.digests, begins, key.tenant, public)
            way = StoredWay(cached, cached, cached)
            same = Prefetch(place, key, wish.digests, stored, way, bound_s, now + bound_s, is_trial)
            self._prefetches[place] = same
            self._steps.ask(same)
        same.join(wish.user, wish.deadline)
        self._of[wish.user] = same
        return True

    def _refuse(self, user: Hashable) -> bool:
        self._counts.skipped_reads += 1
        self._refused.add(user)
        return False

    def _begins(self, key: RadixKey) -> Begins:
        """Behind what the tree has of the key, and behind the public pages that it has of it."""
        path, own = self._cached(key)
        if not path or not path[-1].tenant or not self._tree.shares:
            return Begins(own, own)
        return Begins(own, self._cached(public_key(key))[1])

    def _cached(self, key: RadixKey) -> tuple[list[TreeNode], int]:
        """What a forward can continue from, of device and host, and its pages."""
        path, tokens = self._tree.walk(key)
        path = self._tree.usable(path, tokens // self._tree.page_size, with_host=True)
        return path, sum(node.num_pages for node in path)

    def _pays(self, tokens: int, tokens_per_s: float) -> bool:
        if self._config.prefetch_if_slower:
            return True
        compute_s = tokens / tokens_per_s if tokens_per_s else None
        return self._times.pays(tokens // self._tree.page_size, compute_s)

    def _bound_s(self, pages: int) -> float:
        """As SGLang's timeout policy, with an upper bound."""
        per_page = self._tree.page_size / 1024 * self._config.prefetch_s_per_1024_tokens
        return min(self._config.prefetch_base_s + pages * per_page, self._config.prefetch_max_s)

    def waits(self, user: Hashable) -> bool:
        """Whether the user's prefetch is under way or will be, and its policy lets the user wait for it."""
        prefetch, policy = self._of.get(user), self._config.prefetch_policy
        if user in self._behind:
            deadline = self._behind[user].deadline
        elif prefetch is None or prefetch.is_over or prefetch.is_trial:
            return False
        else:
            deadline = prefetch.users[user]
        return policy == "wait_complete" or (policy == "timeout" and self._clock() < deadline)

    def arrived(self, user: Hashable) -> int:
        """Tokens that have come for the user so far."""
        prefetch = self._of.get(user)
        return 0 if prefetch is None else prefetch.read * self._tree.page_size

    def forget(self, user: Hashable) -> None:
        """The user does not wait any more. What has arrived by then may give way now; a prefetch that nobody
        wants is stopped, unless it is a trial: that has its deadline. One that has no host pages yet is over
        at once, because its work may not end for long."""
        self._refused.discard(user)
        self._behind.pop(user, None)
        prefetch = self._of.pop(user, None)
        if prefetch is None:
            return
        prefetch.users.pop(user, None)
        if not prefetch.users:
            prefetch.is_stopped = not prefetch.is_trial
            prefetch.let_go(self._host)
            if prefetch.is_stopped and not prefetch.ids:
                self._leave(prefetch)

    def _is_much(self, pages: int) -> bool:
        """Whether so many pages more were too much on the host for requests that wait."""
        known = {id(p): p for p in (*self._prefetches.values(), *self._of.values())}
        taken = sum(p.way.end - p.way.start for p in known.values())
        return taken > 0 and taken + pages > self._pool.arenas[self._primary].num_pages // _HOST_SHARE

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.is_over = True
        if prefetch.seconds:
            self._times.measured(prefetch.read, prefetch.seconds, self._clock())
        self._leave(prefetch)

    def _leave(self, prefetch: Prefetch) -> None:
        """It is not under way any more: those behind it begin, from what it has brought."""
        if self._prefetches.get(prefetch.place) is not prefetch:
            return
        del self._prefetches[prefetch.place]
        for wish in [one for one in self._behind.values() if one.place == prefetch.place]:
            del self._behind[wish.user]
            self._begin(wish)

    def tenants(self) -> set[str]:
        """For whom something is read: their key strings."""
        return {prefetch.key.tenant for prefetch in self._prefetches.values()}

    @property
    def are_kept(self) -> bool:
        """Whether something that was read is kept for a request that waits."""
        return any(prefetch.kept for prefetch in self._of.values())

    def held_on_host(self) -> Iterator[Mapping[str, Pages]]:
        """Host pages that prefetches read into."""
        return (p.ids for p in self._prefetches.values() if p.ids)


def _digests(key: RadixKey, tokens: int, page_size: int) -> list[PageDigest]:
    """Those of the first `tokens` tokens' pages."""
    return page_digests(key.namespace.seed, key[:tokens].tokens.tobytes(), page_size, key.namespace.is_bigram)
