"""TenantRemoval: takes what belongs to some tenants out of a tree, from device and host, a part at a time.

A pass looks at every node once. Of a private node it removes all that is below, leaves first. What is locked,
on its way between tiers, or above such a node stays: a later pass finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvcache.radix_tree import RadixTree
from kvcache.tenancy.visibility import is_settled
from kvcache.tree_node import TreeNode
from wire.page_hash import tenant_of_key

DEVICE, HOST = "device", "host"


@dataclass(slots=True)
class Removed:
    """What was removed of one tenant: by tier, pages of the primary group, and bytes of all groups."""

    nodes: int = 0
    pages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    left_pages: int = 0  # what the pass could not remove


class TenantRemoval:
    """One tree's. All methods are called on the tree's thread."""

    def __init__(
        self,
        tree: RadixTree,
        page_bytes: Mapping[str, int],
        goes: Callable[[str], bool],
    ) -> None:
        """`page_bytes` are those of a page, or state, by group. `goes`: whether what has this key string
        (wire/page_hash.py) is to be removed."""
        self._tree = tree
        self._page_bytes = page_bytes
        self._goes = goes
        self._ahead: list[TreeNode] = []  # to be looked at
        self._going: list[TreeNode] = []  # to be removed, the last one first
        self._removed: dict[str, Removed] = {}

    def begin(self) -> None:
        """Begin a pass."""
        self._ahead = list(self._tree.root.children.values())
        self._going, self._removed = [], {}

    def step(self, most: int) -> dict[str, Removed] | None:
        """Look at, or remove, at most about `most` nodes. At the end of the pass: what it has removed, by
        name of the tenant."""
        for _ in range(most):
            if self._going:
                self._remove(self._going.pop())
            elif self._ahead:
                self._look_at(self._ahead.pop())
            else:
                return self._removed
        return None

    def _look_at(self, node: TreeNode) -> None:
        """A node that was split since it was listed: its upper part belongs to the same tenant."""
        if not node.tenant:
            self._ahead += node.children.values()
        elif self._goes(node.tenant):
            top = next(one for one in node.path() if one.tenant == node.tenant)
            self._going = [top, *top.descendants()]

    def _remove(self, node: TreeNode) -> None:
        tree, parent, told = self._tree, node.parent, self._of(node)
        assert parent is not None, "the root belongs to nobody"
        if parent.children.get(node.child_key(tree.page_size)) is not node:
            return  # it has gone meanwhile
        if node.children or node.lock_ref or not is_settled(node):
            told.left_pages += node.num_pages
            return
        told.nodes += 1
        if node.is_resident:
            told.pages[DEVICE] += node.num_pages
            for component in tree.components:
                pages = np.count_nonzero(component.all_pages([node]))
                told.bytes[DEVICE] += int(pages) * self._page_bytes[component.name]
            tree.leave_device(node)
        if node.host is not None and tree.lower is not None:
            for group, ids in node.host.ids.items():
                told.bytes[HOST] += int(np.count_nonzero(ids)) * self._page_bytes[group]
            told.pages[HOST] += node.num_pages if node.host.ids else 0
            tree.lower.give_up(node)
        else:
            tree.remove(node)
        if parent.is_resident:
            tree.settle(parent)

    def _of(self, node: TreeNode) -> Removed:
        return self._removed.setdefault(tenant_of_key(node.tenant)[0], Removed())
