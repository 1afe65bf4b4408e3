"""StorageBacklog: what the host tier has for the storage, until the storage tier takes it."""

from __future__ import annotations

from collections import OrderedDict

from kvcache.tree_node import TreeNode
from wire.page_hash import PageDigest


class StorageBacklog:
    """There is one where there is a storage. All methods are called on the tree's thread."""

    def __init__(self) -> None:
        self._new: OrderedDict[TreeNode, None] = OrderedDict()  # as they came: parents first
        self._withdrawn: list[PageDigest] = []

    def __len__(self) -> int:
        """How many nodes are to be stored."""
        return len(self._new)

    def __contains__(self, node: TreeNode) -> bool:
        """Whether the node is to be stored."""
        return node in self._new

    def add(self, node: TreeNode) -> None:
        """The host has something of `node` that storage lacks, perhaps under this owner's name alone."""
        self._new.pop(node, None)
        self._new[node] = None

    def drop(self, node: TreeNode) -> None:
        """`node` is not to be stored, or not any more."""
        self._new.pop(node, None)

    def divided(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`."""
        if lower in self._new:
            self.add(upper)
            self._new.move_to_end(upper, last=False)

    def withdraw(self, pages: list[PageDigest]) -> None:
        """These pages have stopped being public: storage is to forget them under their public names."""
        self._withdrawn += pages

    def first(self) -> TreeNode | None:
        """What is to be stored next. It stays here, and may have lost its copy."""
        return next(iter(self._new), None)

    def take_withdrawn(self) -> list[PageDigest]:
        """What was withdrawn since the last call."""
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn
