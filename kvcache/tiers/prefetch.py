"""Prefetch: one read of a prompt's pages from storage into host pages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvcache.allocator import Pages
from kvcache.radix_key import RadixKey
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.pieces import pieces
from kvcache.tiers.stored_way import StoredNames, StoredWay
from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest

Place = tuple[str, PageDigest]
"""Whose prefetch, and the first page that the tree lacks. Tenants share none: one would wait for another."""


@dataclass(slots=True)
class StorageCounts:
    """Pages of the primary group, since the start."""

    written_pages: int = 0
    read_pages: int = 0
    failed_writes: int = 0
    skipped_reads: int = 0  # prefetches that would have taken longer than computing


@dataclass(slots=True)
class PrefetchWish:
    """What a user wants to have from storage, as long as it waits for another prefetch."""

    user: Hashable
    key: RadixKey
    tokens_per_s: float  # of computing it; 0: not known
    digests: Sequence[PageDigest] = ()  # of all its pages, once they are needed
    deadline: float = 0.0  # when the user waits no more; 0: it has not been set
    place: Place | None = None  # of the prefetch that it waits for


@dataclass(slots=True, eq=False)
class Prefetch:
    """A way of `key` through storage, whose pages come into host pages `ids`. These have the groups' forms
    for a path of `way.end` pages."""

    place: Place
    key: RadixKey
    digests: Sequence[PageDigest]
    stored: StoredNames
    way: StoredWay  # empty until it is known what is there
    bound_s: float  # how long it should take at most
    deadline: float  # of a trial
    is_trial: bool  # it should take longer than computing
    users: dict[Hashable, float] = field(default_factory=dict)  # until when each waits
    names: dict[str, list[bytes]] = field(default_factory=dict)  # by group, one for each page of the way
    ids: dict[str, Pages] = field(default_factory=dict)
    read: int = 0  # pages of the primary group that have arrived, from the way's start on
    kept: list[tuple[TreeNode, int]] = field(default_factory=list)  # nodes whose copies are locked; pages
    kept_pages: int = 0  # of the path that has them
    seconds: float = 0.0  # that the backend has taken for it; the mover's thread adds them
    is_stopped: bool = False  # the mover's thread begins nothing for it
    is_over: bool = False

    def serves(self, digests: Sequence[PageDigest]) -> bool:
        """Whether it brings all that a prompt of these pages wants. Of a longer prompt that holds if there is
        one group: the others are read for the end alone. A longer one that is stopped is left to end."""
        if len(digests) != len(self.digests):
            is_longer = len(digests) < len(self.digests)
            if not is_longer or len(self.stored.groups) > 1 or self.is_stopped:
                return False
        return digests[-1] == self.digests[len(digests) - 1]

    def join(self, user: Hashable, deadline: float) -> None:
        """The user wants it, too, and waits until `deadline`. If nobody wanted it any more, it goes on."""
        if not self.is_trial:
            self.is_stopped = False
        self.users[user] = deadline

    def stop_if_late(self, now: float) -> None:
        """A trial, for which nobody waits, goes no further than its deadline."""
        if self.is_trial and now >= self.deadline:
            self.is_stopped = True

    def keep(self, path: Sequence[TreeNode]) -> None:
        """Lock the copies of a path, which begins with those that are locked already, until its users have
        them. Else what is read for those at the end of a long queue would take the place of what was read for
        those before them."""
        end = 0
        for node in path:
            start, end = end, end + node.num_pages
            if start >= self.kept_pages and node.host is not None and not node.host.is_empty:
                node.host.locks += 1
                self.kept.append((node, node.num_pages))
        self.kept_pages = max(self.kept_pages, end)

    def let_go(self, host: HostTier) -> None:
        """Unlock them."""
        for node, pages in self.kept:
            for piece, _, _ in pieces(node, pages):
                host.unlock(piece)
        self.kept, self.kept_pages = [], 0
