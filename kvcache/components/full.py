"""FullComponent: every token's KV is needed, so a match is valid as far as the pages are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages
from kvcache.components.base import Lengths, TreeComponent
from kvcache.eviction import LeafEvictor
from kvcache.tree_node import TreeNode


class FullComponent(TreeComponent):
    """Keeps `node.page_ids` and counts `node.lock_ref`: a lock on a node covers the whole path above it.

    Its nodes on offer are the unlocked leaves. Sizes are in tokens.
    """

    name = "full"

    def __init__(self, allocator: BaseTokenToKVPoolAllocator, policy: str) -> None:
        self.evictor: LeafEvictor = LeafEvictor(policy, 1)
        self._allocator = allocator
        self._evictable = 0
        self._protected = 0

    def valid_lengths(self, path: Sequence[TreeNode], pages: int) -> Lengths:
        """All of them: a node without pages does not exist."""
        del path
        return np.ones(pages + 1, bool)

    def insert(self, node: TreeNode, start: int, offer: Any) -> None:
        """Count it as evictable; its pages came with it."""
        del start, offer
        self._evictable += node.num_tokens

    def lock(self, node: TreeNode) -> None:
        """Protect the path from `node` to the root."""
        moved = 0
        step = node
        while (parent := step.parent) is not None:
            if not step.lock_ref:
                moved += step.num_tokens
            step.lock_ref += 1
            step = parent
        self._evictable -= moved
        self._protected += moved

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the same node."""
        assert node.lock_ref > 0, "unlocked more often than locked"
        moved = 0
        step = node
        while (parent := step.parent) is not None:
            left = step.lock_ref = step.lock_ref - 1
            if not left:
                moved += step.num_tokens
            step = parent
        self._evictable += moved
        self._protected -= moved

    def may_evict(self, node: TreeNode) -> bool:
        """Only unlocked leaves go."""
        return not node.lock_ref and not node.children

    def free(self, node: TreeNode) -> None:
        """Give its pages back to the allocator."""
        assert node.lock_ref == 0, "a locked node is never evicted"
        self.evictor.withdraw(node)
        self._allocator.free_now(node.value)
        self._evictable -= node.num_tokens

    def evictable_size(self) -> int:
        """Tokens on nodes without a lock."""
        return self._evictable

    def protected_size(self) -> int:
        """Tokens on locked nodes."""
        return self._protected

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """As the base says; and a locked node has locked ancestors."""
        total = sum(node.num_tokens for node in nodes)
        protected = sum(node.num_tokens for node in nodes if node.lock_ref)
        assert protected == self._protected, "protected_size is not the sum over locked nodes"
        assert total - protected == self._evictable, "evictable_size is not the sum over unlocked nodes"
        for node in nodes:
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref >= below, "a node is locked less often than what lies below it"

    def all_pages(self, nodes: Iterable[TreeNode]) -> Pages:
        """Every page id."""
        return np.frombuffer(b"".join([node.page_ids for node in nodes]), np.int32)

    def held(self, node: TreeNode) -> int:
        """All its tokens."""
        return node.num_tokens

    def describe(self, node: TreeNode) -> str:
        """Pages."""
        return f"full={node.num_pages}"
