"""TreeComponent: what the tree asks of each KV group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcache.tree_node import TreeNode


class TreeComponent(ABC):
    """One KV group on the tree. Sizes are in tokens of that group."""

    name: str

    @abstractmethod
    def valid_nodes(self, path: Sequence[TreeNode]) -> int:
        """How many nodes from the start of `path` make a match that this group can continue from."""

    @abstractmethod
    def held_tokens(self, node: TreeNode) -> int:
        """What this group keeps on `node`."""

    @abstractmethod
    def insert(self, node: TreeNode) -> None:
        """`node` is new and holds this group's memory, unlocked."""

    @abstractmethod
    def free(self, node: TreeNode) -> int:
        """Give back what this group keeps on an unlocked node; returns tokens freed."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has just taken the first pages of `lower`; divide what this group keeps in `parts`."""

    @abstractmethod
    def lock(self, node: TreeNode) -> None:
        """Keep what a request that matched up to `node` needs."""

    @abstractmethod
    def unlock(self, node: TreeNode) -> None:
        """The inverse of `lock`."""

    def cut_points(self, matched_len: int, prompt_len: int) -> tuple[int, ...]:
        """Lengths in `(matched_len, prompt_len)` where this group wants a forward to end. By default none."""
        del matched_len, prompt_len
        return ()

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens on nodes without a lock."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens on locked nodes."""
