"""TreeComponent: what the tree asks of each KV group.

A node can lack what a group other than the primary one would keep there. It is then a tombstone of that
group, and a match cannot end there. The tree keeps two rules with the help of these methods: a match ends
where every group can continue, and no leaf is a tombstone (unless a lock keeps the leaf from being removed).

What live requests hold of a group is the business of its GroupHoldings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.allocator import NO_PAGES, Pages
from kvcache.eviction import Evictor
from kvcache.shares.pages import TenantPages
from kvcache.tree_node import TreeNode

Lengths = npt.NDArray[np.bool_]
"""`[pages + 1]`: for every length in pages, whether something is possible there."""


def longest(lengths: Sequence[Lengths]) -> int:
    """The longest length that all of `lengths` allow; 0 if there is none."""
    allowed = np.flatnonzero(np.logical_and.reduce(lengths))
    return int(allowed[-1]) if len(allowed) else 0


class PartReport(NamedTuple):
    """What a group keeps on a node: of the primary group tokens, else pages; and the same in a few words."""

    held: int
    text: str


@dataclass(slots=True, eq=False)
class Tally:
    """What a check has counted so far of one group, in pages."""

    kept: int = 0
    locked: int = 0  # of them


class TreeComponent(ABC):
    """One KV group on the tree. Except for the primary group it keeps its data in `node.parts[name]`.

    Sizes are in pages of the group; a state slot is a page.
    """

    name: str
    """The group's name."""
    tells_ends = False
    """Whether what it keeps on a node shows that a forward ended there."""
    evictor: Evictor
    tenants: TenantPages | None = None
    """Counts the pages on the tree by tenant, where tenants have shares."""

    # -- tenants -----------------------------------------------------------------------------------

    def count(self, node: TreeNode, pages: int) -> None:
        """`node` has so many pages of this group more, or fewer."""
        if self.tenants is not None:
            self.tenants.add(node.tenant, pages)

    def give(self, node: TreeNode, tenant: str) -> None:
        """`node` is about to be the tenant's: what this group keeps on it counts there from now on."""
        if self.tenants is not None:
            pages = len(self.all_pages([node]))
            self.tenants.add(node.tenant, -pages)
            self.tenants.add(tenant, pages)

    # -- matching ----------------------------------------------------------------------------------

    def valid_lengths(self, path: Sequence[TreeNode], pages: int, also: Pages = NO_PAGES) -> Lengths:
        """Lengths of a path of `pages` pages at which a forward could start; always True at 0.

        `also` says what a lower tier has: of a group with a page for each token page an id for each page, of
        a state group one for each node; 0 for none.
        """
        del path, also
        return np.ones(pages + 1, bool)

    @abstractmethod
    def gather(self, path: Sequence[TreeNode]) -> Pages:
        """What this group has of `path`, which is not empty: page ids, 0 where it has none."""

    # -- growing -----------------------------------------------------------------------------------

    def leaf_lengths(self, offer: Pages, pages: int) -> Lengths:
        """Lengths of a key of `pages` pages at which a new leaf could end, given this group's `offer`."""
        del offer
        return np.ones(pages + 1, bool)

    def revive(self, path: Sequence[TreeNode], offer: Pages, is_whole: bool) -> None:
        """Take from `offer` what `path` lacks. `path` is all of the key if `is_whole`, else its beginning."""
        del path, offer, is_whole

    @abstractmethod
    def insert(self, node: TreeNode, start: int, offer: Pages) -> None:
        """`node` is a new unlocked leaf that begins at page `start` of the key: take its part of `offer`."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`; divide what this group keeps in `parts`."""
        del upper, lower

    def hand_over(self, copy: TreeNode, kept: TreeNode) -> None:
        """Both have the same pages, and `copy`, which nothing locks, is about to go: `kept` takes from it
        what it lacks of this group."""
        del copy, kept

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """A request that matched up to `node` locks what it needs of this group."""
        del node

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the same node."""
        del node

    # -- shrinking ---------------------------------------------------------------------------------

    def is_tombstone(self, node: TreeNode) -> bool:
        """Whether a match cannot end at `node` because this group has nothing there."""
        del node
        return False

    @abstractmethod
    def may_evict(self, node: TreeNode) -> bool:
        """Whether evicting `node`, or this group's part of it, would free anything."""

    def shrink(self, node: TreeNode, wanted: int, is_free_leaf: bool) -> None:
        """Free at most `wanted` pages of this group on `node`.

        An unlocked leaf must stay a node at which a match can end. If that does not free enough, the tree
        removes the leaf.
        """
        del node, wanted, is_free_leaf

    @abstractmethod
    def free(self, node: TreeNode) -> None:
        """`node` is unlocked and about to be removed: free what this group keeps on it, and withdraw it from
        the evictor."""

    # -- looking -----------------------------------------------------------------------------------

    @abstractmethod
    def evictable(self) -> int:
        """Pages that eviction can free."""

    @abstractmethod
    def protected(self) -> int:
        """Pages under a lock."""

    def tally(self, nodes: Sequence[TreeNode], tally: Tally) -> None:
        """Count what this group keeps on `nodes`, and assert its own rules for each of them."""
        del nodes, tally

    def all_pages(self, nodes: Iterable[TreeNode]) -> Pages:
        """Page ids that this group keeps on `nodes`."""
        pages = np.concatenate([NO_PAGES, *(self.gather([node]) for node in nodes)])
        kept: Pages = pages[pages != 0]
        return kept

    @abstractmethod
    def report(self, node: TreeNode) -> PartReport:
        """What this group keeps on `node`."""
