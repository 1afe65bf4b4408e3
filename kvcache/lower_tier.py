"""LowerTier: what the tree asks of the tier below the device."""

from __future__ import annotations

from typing import Protocol

from kvcache.tree_node import TreeNode


class LowerTier(Protocol):
    """Implemented by HostTier. Called on the tree's thread."""

    def keeps(self, node: TreeNode) -> bool:
        """`node`, an unlocked leaf of the device, is about to leave it. Whether it stays in the tree, on the
        host alone."""
        ...

    def shrinking(self, node: TreeNode) -> None:
        """A part of what `node` has on the device, of one group, is about to be given up; the node stays."""
        ...

    def divided(self, upper: TreeNode) -> None:
        """`upper` has just taken the first pages of a node that has a host copy."""
        ...

    def dropped(self, node: TreeNode) -> None:
        """`node` leaves the tree: free what it has on the host."""
        ...
