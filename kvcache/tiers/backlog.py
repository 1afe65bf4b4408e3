"""StorageBacklog: what the host tier has for the storage, until the storage tier takes it."""

from __future__ import annotations

from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest


class StorageBacklog:
    """There is one where there is a storage. All methods are called on the tree's thread."""

    def __init__(self) -> None:
        self._new: dict[TreeNode, None] = {}  # in the order in which they came: parents first
        self._withdrawn: list[PageDigest] = []

    def add(self, node: TreeNode) -> None:
        """The host has something of `node` that storage lacks, perhaps under this owner's name alone."""
        self._new.pop(node, None)
        self._new[node] = None

    def drop(self, node: TreeNode) -> None:
        """`node` is not to be stored, or not any more."""
        self._new.pop(node, None)

    def withdraw(self, pages: list[PageDigest]) -> None:
        """These pages have stopped being public: storage is to forget them under their public names."""
        self._withdrawn += pages

    def take_new(self) -> list[TreeNode]:
        """What was added since the last call. Some may have lost their copies."""
        new, self._new = list(self._new), {}
        return new

    def take_withdrawn(self) -> list[PageDigest]:
        """What was withdrawn since the last call."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn
