"""TreeObserver: an interface for objects that follow the changes of a tree, such as the event recorder."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from kvcache.tree_node import TreeNode


class StorageMedium(StrEnum):
    """Where pages are. The values are what consumers of KV events call these media."""

    GPU = "GPU"  # what attention reads, on any device
    CPU = "CPU"  # the host tier
    STORAGE = "STORAGE"


class TreeObserver(Protocol):
    """Called on the tree's thread, in the order of the changes. A split is no change: no page moves."""

    def stored(self, node: TreeNode, medium: StorageMedium) -> None:
        """All pages of `node` are in `medium` now, and were not."""
        ...

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """The pages of `node` are about to leave `medium`."""
        ...
