"""TreeObserver: who wants to hear what the tree does. The tree knows no more of them than this."""

from __future__ import annotations

from typing import Protocol

from kvcache.tree_node import TreeNode


class TreeObserver(Protocol):
    """Called on the tree's thread, in the order of what happened. A split is not told: no page moves."""

    def stored(self, node: TreeNode) -> None:
        """`node` is new, with all its pages; it is linked into the tree."""
        ...

    def removed(self, node: TreeNode) -> None:
        """`node` and its pages are about to go."""
        ...
