"""Prefetches: what a request's prompt has in storage, read into host pages while the request waits.

A prefetch asks first what is there, then takes host pages for it, and reads. It ends where every group can
continue: of a window group the last window is read, of a state group the state there. Two requests with the
same missing prefix share one. What has arrived stays on the host until the requests have their turn. What
would be computed sooner is not read, but for a trial now and then, for which no request waits. The backend is
called on the mover's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import Pages
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.storage.backend import StorageBackend
from kvcache.storage.keys import StorageKeys
from kvcache.tiers.agreement import RankReport, agree
from kvcache.tiers.config import TierConfig
from kvcache.tiers.host_parts import portions
from kvcache.tiers.host_pool import HostPool
from kvcache.tiers.host_tier import HostTier, scattered
from kvcache.tiers.mover import Failed, WorkQueue
from kvcache.tiers.prefetch import Prefetch, usable
from kvcache.tiers.read_times import ReadTimes
from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest, page_digests

_READ_PAGES = 32
"""Read at once: what a prefetch that is stopped still waits for."""
_HOST_SHARE = 2
"""What is read for requests that wait takes one page in so many of the host's, but for a single long one."""
_OVER = RankReport({}, 0, is_over=True)


@dataclass(slots=True)
class StorageCounts:
    """Pages of the primary group, since the start."""

    written_pages: int = 0
    read_pages: int = 0
    failed_writes: int = 0
    skipped_reads: int = 0  # prefetches that would have taken longer than computing


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
    ) -> None:
        self._config = config
        self._tree = tree
        self._host = host
        self._pool: HostPool = host.pool
        self._mover = mover
        self._backend = backend
        self._keys = keys
        self._counts = counts
        self._clock = clock
        self._times = ReadTimes()
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._prefetches: dict[PageDigest, Prefetch] = {}  # by the digest of the first page
        self._of: dict[Hashable, Prefetch] = {}  # by user

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._prefetches)

    def prefetch(self, user: Hashable, key: RadixKey, tokens_per_s: float = 0.0) -> bool:
        """Begin to read what the tree lacks of `key`, if that should pay. Whether it has begun. `key` has
        what a match may use, and computing it takes `tokens_per_s`, 0 if that is not known. A user that asks
        again has what it had."""
        if user in self._of:
            return not self._of[user].is_over
        path, cached = self._tree.walk(key)
        size = self._tree.page_size
        cached = sum(node.num_pages for node in self._tree.usable(path, cached // size, with_host=True))
        total = len(key) // size
        tokens = (total - cached) * size
        if tokens < max(1, self._config.prefetch_threshold):
            return False
        digests = page_digests(
            key.namespace.seed, key[: total * size].tokens.tobytes(), size, key.namespace.is_bigram
        )
        same = self._prefetches.get(digests[cached])
        if same is None:
            is_trial = not self._pays(tokens, tokens_per_s)
            if is_trial and not self._times.try_again(self._clock()):
                self._counts.skipped_reads += 1
                return False
            names = {g: self._keys.keys(g, digests[cached:], key.tenant) for g in self._parts}
            deadline = self._clock() + self._bound_s(total - cached)
            same = Prefetch(key, cached, names, deadline, is_trial)
            self._prefetches[digests[cached]] = same
            self._mover.submit(
                "reads", self._asker(same), lambda end: self._found(digests[cached], same, end)
            )
        same.users.add(user)
        self._of[user] = same
        return True

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
        """Whether the user's prefetch is under way, and its policy lets the user wait for it."""
        prefetch = self._of.get(user)
        if prefetch is None or prefetch.is_over or prefetch.is_trial:
            return False
        if self._config.prefetch_policy == "best_effort":
            return False
        return self._config.prefetch_policy == "wait_complete" or self._clock() < prefetch.deadline

    def arrived(self, user: Hashable) -> int:
        """Tokens that have come for the user so far."""
        prefetch = self._of.get(user)
        return 0 if prefetch is None else prefetch.read * self._tree.page_size

    def forget(self, user: Hashable) -> None:
        """The user does not wait any more. What has arrived by then may give way now; a prefetch that nobody
        wants is stopped, unless it is a trial: that has its deadline."""
        prefetch = self._of.pop(user, None)
        if prefetch is None:
            return
        prefetch.users.discard(user)
        if not prefetch.users:
            prefetch.is_stopped = not prefetch.is_trial
            prefetch.let_go(self._host)

    def _asker(self, prefetch: Prefetch) -> Callable[[], RankReport]:
        """On the mover's thread: what of the key storage has."""

        def ask() -> RankReport:
            if prefetch.is_stopped:
                return _OVER
            began = self._clock()
            there = {group: np.array(self._backend.exists(names)) for group, names in prefetch.names.items()}
            prefetch.seconds += self._clock() - began
            return RankReport(there, 0, is_over=False)

        return ask

    def _found(self, first: PageDigest, prefetch: Prefetch, told: RankReport | Failed) -> None:
        """Take host pages for what can be had and used, from the first page of the key on."""
        found = _OVER if isinstance(told, Failed) else agree([told])
        prefetch.stop_if_late(self._clock())
        end = prefetch.start
        if not found.is_over and not prefetch.is_stopped:
            end += usable(found.there, self._parts, prefetch.start)
        if end == prefetch.start or self._is_much(end - prefetch.start):
            self._end(first, prefetch)
            return
        wanted, start = {}, prefetch.start
        for group, part in self._parts.items():
            if not part.is_by_page:
                wanted[group] = np.ones(1, np.int32)
                continue
            form = np.zeros(end, np.int32)
            form[part.needed(end)] = 1
            form[:start] = 0
            wanted[group] = form
        taken = self._host.alloc({group: int(form.sum()) for group, form in wanted.items()})
        if taken is None:
            self._end(first, prefetch)
            return
        prefetch.end = end
        prefetch.ids = {group: scattered(wanted[group], ids) for group, ids in taken.items()}
        self._read_more(first, prefetch)

    def _is_much(self, pages: int) -> bool:
        """Whether so many pages more were too much on the host for requests that wait."""
        known = {id(p): p for p in (*self._prefetches.values(), *self._of.values())}
        taken = sum(max(p.end - p.start, 0) for p in known.values())
        return taken > 0 and taken + pages > self._pool.arenas[self._primary].num_pages // _HOST_SHARE

    def _read_more(self, first: PageDigest, prefetch: Prefetch) -> None:
        """Read the next pages; with the last ones those of the other groups."""
        begin = prefetch.start + prefetch.read
        end = min(begin + _READ_PAGES, prefetch.end)
        names, pages = self._part(prefetch, self._primary, begin, end)
        if end == prefetch.end:
            for group, part in self._parts.items():
                if group != self._primary:
                    first_page = prefetch.start if part.is_by_page else prefetch.end - 1
                    more = self._part(prefetch, group, first_page, prefetch.end)
                    names, pages = names + more[0], pages + more[1]

        def read() -> RankReport:
            began = self._clock()
            is_whole = not prefetch.is_stopped and all(self._backend.get(names, pages))
            prefetch.seconds += self._clock() - began
            return RankReport({}, end - begin if is_whole else 0, is_over=not is_whole)

        def done(told: RankReport | Failed) -> None:
            arrived = _OVER if isinstance(told, Failed) else agree([told])
            if arrived.read:
                prefetch.read += arrived.read
                self._counts.read_pages += arrived.read
                if end == prefetch.end or len(self._parts) == 1:
                    self._enter(prefetch, end)
            if arrived.is_over or end == prefetch.end:
                self._pool.free(prefetch.ids)
                self._end(first, prefetch)
            else:
                prefetch.stop_if_late(self._clock())
                self._read_more(first, prefetch)

        self._mover.submit("reads", read, done)

    def _part(
        self, prefetch: Prefetch, group: str, begin: int, end: int
    ) -> tuple[list[bytes], list[memoryview]]:
        """Names and host pages of a group's pages [begin, end), or of the state after them."""
        arena, is_by_page = self._pool.arenas[group], self._parts[group].is_by_page
        names = prefetch.names[group][begin - prefetch.start : end - prefetch.start]
        ids = prefetch.ids[group][begin:end] if is_by_page else prefetch.ids[group]
        kept = [(name, arena.view(page)) for name, page in zip(names, ids.tolist(), strict=True) if page]
        return [name for name, _ in kept], [page for _, page in kept]

    def _enter(self, prefetch: Prefetch, end: int) -> None:
        """Put the first `end` pages into the tree, as far as they are not there yet."""
        ids = {
            group: of[:end].copy() if self._parts[group].is_by_page else of.copy()
            for group, of in prefetch.ids.items()
        }
        for group, part in self._parts.items():
            prefetch.ids[group][: end if part.is_by_page else 1] = 0
        tree, key = self._tree, prefetch.key[: end * self._tree.page_size]
        path, tokens = tree.walk(key)
        cached = tokens // tree.page_size
        if cached < int(np.flatnonzero(ids[self._primary])[0]):  # what they continue has gone meanwhile
            self._pool.free(ids)
            return
        if cached < end:
            path.append(tree.append_host(path[-1] if path else tree.root, key, cached, end))
        start = 0
        for node in path:
            stop = start + node.num_pages
            self._fill(node, portions(self._parts, ids, start, stop, end))
            start = stop
        prefetch.let_go(self._host)
        if prefetch.users:
            prefetch.keep(path)

    def _fill(self, node: TreeNode, ids: Mapping[str, Pages]) -> None:
        """Give the node's host copy what it lacks of `ids`; the rest is free again."""
        if node.host is None or node.host.moving:
            self._pool.free(ids)
            return
        taken, surplus = {}, {}
        for group, arrived in ids.items():
            lacks = self._parts[group].on_host([node]) == 0
            taken[group] = np.where(lacks, arrived, 0).astype(np.int32)
            surplus[group] = np.where(lacks, 0, arrived).astype(np.int32)
        self._pool.free(surplus)
        self._host.landed(node, taken, is_stored=True)

    def _end(self, first: PageDigest, prefetch: Prefetch) -> None:
        prefetch.is_over = True
        if prefetch.seconds:
            self._times.measured(prefetch.read, prefetch.seconds, self._clock())
        del self._prefetches[first]

    @property
    def are_kept(self) -> bool:
        """Whether something that was read is kept for a request that waits."""
        return any(prefetch.kept for prefetch in self._of.values())

    def held_on_host(self) -> Iterator[Mapping[str, Pages]]:
        """Host pages that prefetches read into."""
        return (p.ids for p in self._prefetches.values() if p.ids)
