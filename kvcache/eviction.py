"""Which of the nodes that may be evicted goes first.

An Evictor is one heap for every policy. Each component has its own, because each has its own idea of what may
go. A node is in a heap at most once, marked by a bit of `node.offers`; its key is brought up to date when it
comes up, not when it is touched: a hit, a lock or an unlock of a node that is on offer costs nothing here.
(That is sound because touching a node makes its key larger. Where it does not, for mru, `touched` says so.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import ConfigError
from kvcache.tree_node import TreeNode

Policy = Callable[[TreeNode], int]

_TIME_BITS = 48

# Smaller goes first. An access time is the number of the operation that last touched the node.
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

    def __init__(self, policy: str, bit: int) -> None:
        """`bit` is this evictor's own in `TreeNode.offers`."""
        self._policy = eviction_policy(policy)
        self._bit = bit
        self.keys_fall = policy in _FALLING
        # [policy's key, creation, count of pushes, node]. Of a path that was used at once, what was cached
        # first goes first: the end of a conversation is worth most to its next turn.
        self._heap: list[list[Any]] = []
        self._pushed = 0
        self._on_offer = 0

    def __len__(self) -> int:
        return self._on_offer

    def offer(self, node: TreeNode) -> None:
        """`node` may be worth evicting; it stays on offer until it comes up or goes."""
        if not node.offers & self._bit:
            node.offers |= self._bit
            self._on_offer += 1
            self._push(node)

    def touched(self, nodes: Sequence[TreeNode]) -> None:
        """These were just used. Needed only where `keys_fall`: else a key that lags behind does no harm."""
        for node in nodes:
            if node.offers & self._bit:
                self._push(node)

    def withdraw(self, node: TreeNode) -> None:
        """`node` goes."""
        if node.offers & self._bit:
            node.offers &= ~self._bit
            self._on_offer -= 1

    def pop(self, may_go: Callable[[TreeNode], bool]) -> TreeNode | None:
        """The node to evict now; None when there is none. It and those passed over are off offer."""
        heap = self._heap
        while heap:
            entry = heap[0]
            node: TreeNode = entry[_NODE]
            now = self._policy(node)
            if now > entry[_KEY] and node.offers & self._bit:  # used since it was offered
                entry[_KEY:_NODE] = now, node.created, entry[2]
                heapq.heapreplace(heap, entry)
                continue
            heapq.heappop(heap)
            if now == entry[_KEY] and node.offers & self._bit:
                self.withdraw(node)
                if may_go(node):
                    return node
        return None

    def _push(self, node: TreeNode) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, self._entry(node, self._pushed))
        if len(self._heap) > 2 * self._on_offer + 64:  # nodes that went, and keys that fell
            kept = {id(entry[_NODE]): entry[_NODE] for entry in self._heap}.values()
            self._heap = [self._entry(node, i) for i, node in enumerate(kept) if node.offers & self._bit]
            heapq.heapify(self._heap)
            self._pushed = max(self._pushed, len(kept))

    def _entry(self, node: TreeNode, number: int) -> list[Any]:
        return [self._policy(node), node.created, number, node]


class LeafEvictor(Evictor):
    """An evictor of leaves: when a leaf on offer grows, its place in the heap passes to the new leaf.

    So the heap has one entry per leaf, however the tree came to be. The key that is passed on is too small,
    like that of any node used since it was offered; where it would be too large, the place is given up.
    """

    def grown(self, parent: TreeNode, leaf: TreeNode) -> None:
        """`leaf` is new, below `parent`, who is no leaf any more (or was none)."""
        entry = parent.entry
        if entry is None or entry[_KEY] > self._policy(leaf):
            self.withdraw(parent)
            self.offer(leaf)
            return
        parent.offers &= ~self._bit
        leaf.offers |= self._bit
        leaf.entry, entry[_NODE], parent.entry = entry, leaf, None

    def withdraw(self, node: TreeNode) -> None:
        """`node` goes, or is no leaf."""
        super().withdraw(node)
        node.entry = None  # or the two would keep each other alive

    def _entry(self, node: TreeNode, number: int) -> list[Any]:
        node.entry = super()._entry(node, number)
        return node.entry
