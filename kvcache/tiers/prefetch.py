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


@dataclass(slots=True, eq=False)
class Prefetch:
    """A way of `key` through storage, whose pages come into host pages `ids`. These have the groups' forms
    for a path of `way.end` pages."""

    place: Place
    key: RadixKey
    stored: StoredNames
    way: StoredWay  # empty until it is known what is there
    bound_s: float  # how long a user waits for it
    deadline: float
    is_trial: bool  # it should take longer than computing
    users: set[Hashable] = field(default_factory=set)
    names: dict[str, list[bytes]] = field(default_factory=dict)  # by group, one for each page of the way
    ids: dict[str, Pages] = field(default_factory=dict)
    read: int = 0  # pages of the primary group that have arrived, from the way's start on
    kept: list[tuple[TreeNode, int]] = field(default_factory=list)  # nodes whose copies are locked; pages
    seconds: float = 0.0  # that the backend has taken for it; the mover's thread adds them
    is_stopped: bool = False  # the mover's thread begins nothing for it
    is_over: bool = False

    def join(self, user: Hashable, deadline: float) -> None:
        """The user wants it, too. If nobody did any more, it goes on, until `deadline`."""
        if self.is_stopped and not self.is_trial:
            self.is_stopped, self.deadline = False, deadline
        self.users.add(user)

    def stop_if_late(self, now: float) -> None:
        """A trial, for which nobody waits, goes no further than its deadline."""
        if self.is_trial and now >= self.deadline:
            self.is_stopped = True

    def keep(self, path: Sequence[TreeNode]) -> None:
        """Lock the copies of a path until its users have them. Else what is read for those at the end of a
        long queue would take the place of what was read for those before them."""
        for node in path:
            if node.host is not None and not node.host.is_empty:
                node.host.locks += 1
                self.kept.append((node, node.num_pages))

    def let_go(self, host: HostTier) -> None:
        """Unlock them."""
        for node, pages in self.kept:
            for piece, _, _ in pieces(node, pages):
                host.unlock(piece)
        self.kept = []
