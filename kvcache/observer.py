"""TreeObserver: an interface for objects that follow the changes of a tree, such as the event recorder."""

from __future__ import annotations

from typing import Protocol

from kvcache.tree_node import TreeNode


class TreeObserver(Protocol):
    """Called on the tree's thread, in the order of the changes. A split is no change: no page moves."""

    def stored(self, node: TreeNode) -> None:
        """`node` has just been linked into the tree, with all its pages."""
        ...

    def removed(self, node: TreeNode) -> None:
        """`node` and its pages are about to be removed."""
        ...
