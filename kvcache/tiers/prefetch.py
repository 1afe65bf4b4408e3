"""Prefetch: one read of a prompt's pages from storage into host pages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.allocator import Pages
from kvcache.radix_key import RadixKey
from kvcache.tiers.agreement import Presence
from kvcache.tiers.host_parts import HostPart
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.pieces import pieces
from kvcache.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class Prefetch:
    """The pages [start, end) of `key`, on their way from storage into host pages `ids`, which have the
    groups' forms for a path of `end` pages."""

    key: RadixKey
    start: int
    names: dict[str, list[bytes]]  # by group, a storage key for each page from `start` on
    deadline: float
    is_trial: bool  # it should take longer than computing
    users: set[Hashable] = field(default_factory=set)
    end: int = 0
    ids: dict[str, Pages] = field(default_factory=dict)
    read: int = 0  # pages of the primary group that have arrived, from `start` on
    kept: list[tuple[TreeNode, int]] = field(default_factory=list)  # nodes whose copies are locked; pages
    seconds: float = 0.0  # that the backend has taken for it; the mover's thread adds them
    is_stopped: bool = False
    is_over: bool = False

    def stop_if_late(self, now: float) -> None:
        """A trial, for which nobody waits, goes no further than its deadline."""
        self.is_stopped |= self.is_trial and now >= self.deadline

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


def usable(there: Presence, parts: Mapping[str, HostPart], start: int) -> int:
    """How many of the pages that were asked for, from the first on, a forward can continue from. The first of
    `parts` is the primary group's."""
    primary, *others = parts
    missing = np.flatnonzero(~there[primary])
    most = int(missing[0]) if len(missing) else len(there[primary])
    for pages in range(most, 0, -1):
        if all(_continues(there[group][:pages], parts[group], start, pages) for group in others):
            return pages
    return 0


def _continues(there: np.ndarray, part: HostPart, start: int, pages: int) -> bool:
    """Whether storage has what a group needs at the end of `pages` pages. What it needs from before `start`
    the tree has."""
    if not part.is_by_page:
        return bool(there[-1])
    needed = part.needed(start + pages)
    return bool(there[max(0, needed.start - start) :].all())
