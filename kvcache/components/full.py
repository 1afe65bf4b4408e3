"""FullComponent: every token's KV is needed, so a match is valid as far as the pages are there."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.allocator import BaseTokenToKVPoolAllocator
from kvcache.components.base import TreeComponent
from kvcache.tree_node import TreeNode


class FullComponent(TreeComponent):
    """Keeps `node.value` and counts `node.lock_ref`: a lock on a node covers the whole path above it."""

    name = "full"

    def __init__(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        self._allocator = allocator
        self._evictable = 0
        self._protected = 0

    def valid_nodes(self, path: Sequence[TreeNode]) -> int:
        """All of them: a node without pages does not exist."""
        return len(path)

    def held_tokens(self, node: TreeNode) -> int:
        """All its tokens."""
        return node.num_tokens

    def insert(self, node: TreeNode) -> None:
        """Count it as evictable."""
        self._evictable += node.num_tokens

    def free(self, node: TreeNode) -> int:
        """Give its pages back to the allocator."""
        assert node.lock_ref == 0, "a locked node is never evicted"
        self._allocator.free_page_ids(node.value)
        self._evictable -= node.num_tokens
        return node.num_tokens

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Pages and locks are the node's own and divided by it; the sums stay."""

    def lock(self, node: TreeNode) -> None:
        """Protect the path from `node` to the root."""
        moved = 0
        step = node
        while (parent := step.parent) is not None:
            if step.lock_ref == 0:
                moved += step.num_tokens
            step.lock_ref += 1
            step = parent
        self._evictable -= moved
        self._protected += moved

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the same node."""
        moved = 0
        step = node
        while (parent := step.parent) is not None:
            step.lock_ref -= 1
            if step.lock_ref == 0:
                moved += step.num_tokens
            assert step.lock_ref >= 0, "unlocked more often than locked"
            step = parent
        self._evictable += moved
        self._protected -= moved

    def evictable_size(self) -> int:
        """Tokens on nodes without a lock."""
        return self._evictable

    def protected_size(self) -> int:
        """Tokens on locked nodes."""
        return self._protected
