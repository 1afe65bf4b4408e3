"""TreeObserver: an interface for objects that follow the changes of a tree, such as the event recorder."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from kvcache.tree_node import TreeNode


class Tier(StrEnum):
    """Where pages are. The values are what consumers of KV events call these media."""

    DEVICE = "GPU"  # what attention reads, on any device
    HOST = "CPU"
    STORAGE = "STORAGE"


class TreeObserver(Protocol):
    """Called on the tree's thread, in the order of the changes. A split is no change: no page moves."""

    def stored(self, node: TreeNode, tier: Tier) -> None:
        """All pages of `node` are in `tier` now, and were not."""
        ...

    def removed(self, node: TreeNode, tier: Tier) -> None:
        """The pages of `node` are about to leave `tier`."""
        ...
