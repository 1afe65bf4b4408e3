"""The primary group on the tree: every token's KV is needed, so a match is valid wherever there are pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.allocator import BaseTokenToKVPoolAllocator, Pages
from kvcache.components.base import PartReport, Tally, TreeComponent
from kvcache.eviction import LeafEvictor
from kvcache.shares.evictor import SharedLeafEvictor
from kvcache.shares.pages import TenantPages
from kvcache.tree_node import TreeNode


class FullComponent(TreeComponent):
    """Full attention, or latents. Its pages are `node.page_ids`.

    It counts `node.lock_ref`: a lock on a node covers the whole path above it. Its nodes on offer are the
    unlocked leaves.
    """

    def __init__(
        self,
        name: str,
        allocator: BaseTokenToKVPoolAllocator,
        policy: str,
        tenants: TenantPages | None = None,
    ) -> None:
        self.name = name
        self.tenants = tenants
        self.evictor: LeafEvictor | SharedLeafEvictor = LeafEvictor(policy, 1)
        if tenants is not None:
            self.evictor = SharedLeafEvictor(policy, 1, tenants)
        self._allocator = allocator
        self._evictable_pages = 0
        self._protected_pages = 0

    def gather(self, path: Sequence[TreeNode]) -> Pages:
        """The path's page ids."""
        return np.frombuffer(b"".join([node.page_ids for node in path]), np.int32)

    def insert(self, node: TreeNode, start: int, offer: Pages) -> None:
        """Count the node as evictable; its pages came with it."""
        del start, offer
        self._evictable_pages += node.num_pages
        if self.tenants is not None:
            self.tenants.add(node.tenant, node.num_pages)
        assert node.parent is not None, "the root holds no pages"
        self.evictor.grown(node.parent, node)

    def hand_over(self, copy: TreeNode, kept: TreeNode) -> None:
        """The pages, if `kept` is not resident; its parent is."""
        if kept.is_resident or not copy.is_resident:
            return
        kept.page_ids, copy.page_ids = copy.page_ids, b""
        self.count(copy, -copy.num_pages)
        self.count(kept, kept.num_pages)
        assert kept.parent is not None, "the root holds no pages"
        self.evictor.grown(kept.parent, kept)

    def lock(self, node: TreeNode) -> None:
        """Protect the path from `node` to the root."""
        moved = 0
        step = node
        while (parent := step.parent) is not None:
            if not step.lock_ref:
                moved += step.num_pages
            step.lock_ref += 1
            step = parent
        self._evictable_pages -= moved
        self._protected_pages += moved

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock` of the same node."""
        assert node.lock_ref > 0, "unlocked more often than locked"
        moved = 0
        step = node
        while (parent := step.parent) is not None:
            left = step.lock_ref = step.lock_ref - 1
            if not left:
                moved += step.num_pages
            step = parent
        self._evictable_pages += moved
        self._protected_pages -= moved

    def may_evict(self, node: TreeNode) -> bool:
        """Only unlocked leaves may."""
        return not node.lock_ref and not node.resident_children

    def free(self, node: TreeNode) -> None:
        """Give the node's pages back to the allocator."""
        assert node.lock_ref == 0, "a locked node is never evicted"
        self.evictor.withdraw(node)
        self._allocator.free_evicted(node.value)
        self._evictable_pages -= node.num_pages
        if self.tenants is not None:
            self.tenants.add(node.tenant, -node.num_pages)

    def evictable(self) -> int:
        """Pages of nodes without a lock."""
        return self._evictable_pages

    def protected(self) -> int:
        """Pages of locked nodes."""
        return self._protected_pages

    def tally(self, nodes: Sequence[TreeNode], tally: Tally) -> None:
        """A node with a locked child is locked, as often as all its children."""
        for node in nodes:
            if not node.page_ids:
                assert not node.lock_ref, "a locked node is not resident"
                continue
            tally.kept += node.num_pages
            if node.lock_ref:
                tally.locked += node.num_pages
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref >= below, "a node is locked less often than its children"

    def report(self, node: TreeNode) -> PartReport:
        """Tokens, and the number of pages."""
        held = len(node.value)
        return PartReport(node.num_tokens if held else 0, f"{self.name}={held}")
