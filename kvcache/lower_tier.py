"""LowerTier: what the tree asks of the tier below the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcache.allocator import Pages
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

    def divided(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`, which has a host copy."""
        ...

    def held(self, path: Sequence[TreeNode]) -> Mapping[str, Pages]:
        """What the host has of a path, by group, as TreeComponent.valid_lengths takes it."""
        ...

    def dropped(self, node: TreeNode) -> None:
        """`node` leaves the tree: free what it has on the host."""
        ...

    def give_up(self, node: TreeNode) -> None:
        """Free the copy of a node below which there is none, and which nothing reads or writes. A node on the
        host alone leaves the tree."""
        ...

    def renaming(self, node: TreeNode) -> None:
        """`node` is about to become public: storage has it under its owner's name, and is to get it under the
        public one, too."""
        ...

    def withdrawing(self, node: TreeNode) -> None:
        """`node` is about to get an owner whom no request can name: it is not stored any more, and if it is
        public, storage is to forget it."""
        ...
