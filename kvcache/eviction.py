"""The order in which nodes are evicted.

An Evictor is a heap of nodes, the same for every policy. Each component has its own, because each has its own
rule of what may be evicted. A node is on offer at an evictor at most once, marked by a bit of `node.offers`.
Its key in the heap is updated when the node reaches the top, not when the node is used: so a hit, a lock or
an unlock of a node on offer costs nothing here. This is correct because use makes a key larger. Where a
key becomes smaller, `touched` is called: at each use under mru, and when a node comes below another (fold).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import ConfigError
from kvcache.tree_node import TreeNode

Policy = Callable[[TreeNode], int]

_TIME_BITS = 48
_COPY = 1 << 128  # greater than any policy's key

# The smallest key is evicted first. An access time is the number of the operation that last touched the node.
POLICIES: dict[str, Policy] = {
    "lru": lambda node: node.last_access,
    "mru": lambda node: -node.last_access,
    "lfu": lambda node: (node.hit_count << _TIME_BITS) + node.last_access,
    "fifo": lambda node: node.created,
    "filo": lambda node: -node.created,
    "priority": lambda node: (node.priority << _TIME_BITS) + node.last_access,
    "slru": lambda node: (int(node.hit_count >= 2) << _TIME_BITS) + node.last_access,
}
_FALLING = frozenset({"mru"})  # policies whose keys get smaller when a node is touched
_KEY, _NODE = 0, 3  # in an entry of the heap


def copies_first(policy: Policy) -> Policy:
    """The policy, but for copies of what another worker has: they are evicted before all else. Two workers
    that fetched from each other would otherwise both evict what they computed, and nobody had it.

    What was computed right below a copy, and is less than it, goes with it: only leaves are evicted, so a
    question at the end of a copied document would keep all of the document."""

    def key(node: TreeNode) -> int:
        above = node.parent
        goes = node.is_copy or (above is not None and above.is_copy and node.num_pages < above.num_pages)
        return policy(node) - _COPY if goes else policy(node)

    return key


def eviction_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError that lists the valid ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(
            "eviction_policy", f"{name!r} is unknown", f"use one of {', '.join(POLICIES)}"
        ) from None


class Evictor:
    """Nodes on offer to one component, in policy order."""

    def __init__(self, policy: str, bit: int, tenant: str | None = None) -> None:
        """`bit` is this evictor's own in `TreeNode.offers`, or that of several which each have the nodes of
        one `tenant`."""
        self._plain = self._policy = eviction_policy(policy)
        self._bit = bit
        self._tenant = tenant
        self.keys_fall = policy in _FALLING
        # [policy's key, creation, count of pushes, node]. Of nodes with equal keys, which were used together,
        # the one that was cached first is evicted first: the next turn of a conversation needs its end.
        self._heap: list[list[Any]] = []
        self._pushed = 0
        self._on_offer = 0

    def expect_copies(self) -> None:
        """From now on there are copies of what another worker has. Without them the order is not asked for
        what it does with them: it would cost a sixth of each eviction."""
        self._policy = copies_first(self._plain)

    def offer(self, node: TreeNode) -> None:
        """`node` may be evicted. It stays on offer until `pop` takes it off, or `withdraw`."""
        if not node.offers & self._bit:
            node.offers |= self._bit
            self._on_offer += 1
            self._push(node)

    def touched(self, nodes: Sequence[TreeNode]) -> None:
        """The keys of these nodes may have become smaller. One that became larger needs no call: it is found
        out when its entry is the first."""
        for node in nodes:
            if node.offers & self._bit:
                self._push(node)

    def withdraw(self, node: TreeNode) -> None:
        """`node` is no longer on offer."""
        if node.offers & self._bit:
            node.offers &= ~self._bit
            self._on_offer -= 1

    def pop(self, may_go: Callable[[TreeNode], bool]) -> TreeNode | None:
        """The first node in policy order for which `may_go` is true; None if there is none. That node, and
        the nodes before it, are no longer on offer."""
        heap = self._heap
        while heap:
            entry = heap[0]
            node: TreeNode = entry[_NODE]
            now = self._policy(node)
            if now != entry[_KEY] and node.offers & self._bit:  # used since it was offered, or moved
                entry[_KEY:_NODE] = now, node.created, entry[2]
                heapq.heapreplace(heap, entry)
                continue
            heapq.heappop(heap)
            if now == entry[_KEY] and self._has(node):
                self.withdraw(node)
                if may_go(node):
                    return node
        return None

    def _has(self, node: TreeNode) -> bool:
        """Whether a node of which there is an entry is on offer here. It may have become another tenant's
        since: then it is not, though it has the bit."""
        return bool(node.offers & self._bit) and (self._tenant is None or node.tenant == self._tenant)

    def _push(self, node: TreeNode) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, self._entry(node, self._pushed))
        # Entries of nodes that were withdrawn or have become another tenant's, and old keys under mru.
        if len(self._heap) > 2 * self._on_offer + 64:
            kept = {id(entry[_NODE]): entry[_NODE] for entry in self._heap}.values()
            self._heap = [self._entry(node, i) for i, node in enumerate(kept) if self._has(node)]
            heapq.heapify(self._heap)
            self._pushed = max(self._pushed, len(kept))

    def _entry(self, node: TreeNode, number: int) -> list[Any]:
        return [self._policy(node), node.created, number, node]


class LeafEvictor(Evictor):
    """An evictor of leaves. When a leaf on offer gets a child, its heap entry passes to the child.

    So the heap has one entry per leaf, however the tree grew. The key of the entry is too small then, like
    that of any node used since it was offered. If it would be too large, the child gets an entry of its own.
    """

    def grown(self, parent: TreeNode, leaf: TreeNode) -> None:
        """`leaf` is a new child of `parent`, which is no leaf any more."""
        entry = parent.entry
        if entry is None or entry[_KEY] > self._policy(leaf):
            self.withdraw(parent)
            self.offer(leaf)
            return
        parent.offers &= ~self._bit
        leaf.offers |= self._bit
        leaf.entry, entry[_NODE], parent.entry = entry, leaf, None

    def withdraw(self, node: TreeNode) -> None:
        """`node` is no longer on offer: it is removed, or is no leaf any more."""
        super().withdraw(node)
        node.entry = None  # the entry refers to the node: a reference cycle

    def _entry(self, node: TreeNode, number: int) -> list[Any]:
        node.entry = super()._entry(node, number)
        return node.entry
