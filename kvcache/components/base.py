"""TreeComponent: what the tree asks of each KV group.

A node can lack what a group other than the primary one would keep there: it is then a tombstone for that
group, and a match cannot end there. The tree keeps two rules with the help of these methods: a match ends
where every group can continue, and no leaf is a tombstone (unless a lock keeps it from going).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.allocator import Pages
from kvcache.eviction import Evictor
from kvcache.request import CachedRequest
from kvcache.tree_node import TreeNode

Lengths = npt.NDArray[np.bool_]
"""`[pages + 1]`: for every length in pages, whether something can be there."""


def longest(lengths: Sequence[Lengths]) -> int:
    """The longest length that all allow; 0 if there is none."""
    allowed = np.flatnonzero(np.logical_and.reduce(lengths))
    return int(allowed[-1]) if len(allowed) else 0


class TreeComponent(ABC):
    """One KV group on the tree; what it keeps is in `node.parts[name]`. Sizes are in units of that group."""

    name: str
    evictor: Evictor

    # -- matching ----------------------------------------------------------------------------------

    @abstractmethod
    def valid_lengths(self, path: Sequence[TreeNode], pages: int) -> Lengths:
        """Where in a path of `pages` pages a forward could start; always True at 0."""

    def gather(self, path: Sequence[TreeNode]) -> dict[str, Any]:
        """This group's fields of the MatchResult of `path`."""
        del path
        return {}

    def cut_points(self, req: CachedRequest, total: int) -> Iterable[int]:
        """Lengths below `total` where this group wants a forward to end. By default none."""
        del req, total
        return ()

    # -- growing -----------------------------------------------------------------------------------

    def leaf_lengths(self, offer: Any, pages: int) -> Lengths:
        """Where in a key of `pages` pages a new leaf could end, given what is offered of this group."""
        del offer
        return np.ones(pages + 1, bool)

    def revive(self, path: Sequence[TreeNode], offer: Any, is_whole: bool) -> None:
        """Take from `offer` what `path` lacks: all of the key if `is_whole`, else what is cached of it."""
        del path, offer, is_whole

    @abstractmethod
    def insert(self, node: TreeNode, start: int, offer: Any) -> None:
        """`node` is new, unlocked, and begins at page `start` of the key: take its part of `offer`."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`; divide what this group keeps in `parts`."""
        del upper, lower

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """A request that matched up to `node` locks what it needs."""
        del node

    def unlock(self, node: TreeNode) -> None:
        """The inverse of `lock`."""
        del node

    # -- shrinking ---------------------------------------------------------------------------------

    def is_tombstone(self, node: TreeNode) -> bool:
        """Whether a match cannot end at `node` for want of this group."""
        del node
        return False

    @abstractmethod
    def may_evict(self, node: TreeNode) -> bool:
        """Whether evicting `node`, or this group's part of it, would free anything."""

    def shrink(self, node: TreeNode, wanted: int, is_free_leaf: bool) -> None:
        """Free at most `wanted` units of this group, so that `node` stays useful or was not before.

        An unlocked leaf must stay one that a match can end at: if that is not enough, the tree removes it.
        """
        del node, wanted, is_free_leaf

    @abstractmethod
    def free(self, node: TreeNode) -> None:
        """`node`, unlocked, goes: give back what this group keeps on it, and take it off offer."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Units that eviction can free."""

    # -- requests ----------------------------------------------------------------------------------

    def insertable(self, req: CachedRequest, length: int) -> int:
        """The longest length, at most `length`, up to which the request can be cached; 0 if none."""
        del req
        return length

    def offer(self, req: CachedRequest, length: int, ends: bool) -> Any:
        """What the request gives the tree up to `length`; None if that is impossible now.

        A request that goes on (`ends` is false) is left with all it needs.
        """
        del req, length, ends
        return ()

    def adopt(self, req: CachedRequest, cached: Any) -> None:
        """The tree has `cached` (a MatchResult), locked for the request, who now uses that."""
        del req, cached

    # -- looking -----------------------------------------------------------------------------------

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """Assert that the sizes are what counting all `nodes` anew gives, and this group's own rules."""
        del nodes

    @abstractmethod
    def all_pages(self, nodes: Iterable[TreeNode]) -> Pages:
        """Page ids (or slots) that this group keeps on `nodes`."""

    @abstractmethod
    def held(self, node: TreeNode) -> int:
        """Units that this group keeps on `node`."""

    @abstractmethod
    def describe(self, node: TreeNode) -> str:
        """What this group keeps on `node`, in a few words."""
