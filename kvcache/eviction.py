"""Which unlocked leaf goes first.

The Evictor is one heap for every policy, with offers that are dropped lazily: a node that gets locked or
grows a child is only marked, and its heap entry is skipped when it comes up. Each change costs O(log n).
(A linked list would be O(1), but only for lru and mru; scanning the leaves is O(n) for each eviction.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvcache.tree_node import TreeNode
from wire.errors import ConfigError

Policy = Callable[[TreeNode], tuple[int, int]]

# Smaller goes first. An access time is the number of the operation that last touched the node.
POLICIES: dict[str, Policy] = {
    "lru": lambda node: (node.last_access, 0),
    "mru": lambda node: (-node.last_access, 0),
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: (node.created, 0),
    "filo": lambda node: (-node.created, 0),
    "priority": lambda node: (node.priority, node.last_access),
    "slru": lambda node: (int(node.hit_count >= 2), node.last_access),
}


def eviction_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError that lists the valid ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(
            "eviction_policy", f"{name!r} is unknown", f"use one of {', '.join(POLICIES)}"
        ) from None


class Evictor:
    """Nodes that may be evicted, in policy order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, int], int, TreeNode]] = []
        self._last_offer = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    def offer(self, node: TreeNode) -> None:
        """`node` may be evicted; offering it again brings its place up to date."""
        if node.offer == 0:
            self._valid += 1
        self._last_offer += 1
        node.offer = self._last_offer
        heapq.heappush(self._heap, (self._policy(node), node.offer, node))
        if len(self._heap) > 2 * self._valid + 64:
            self._heap = [entry for entry in self._heap if entry[2].offer == entry[1]]
            heapq.heapify(self._heap)

    def withdraw(self, node: TreeNode) -> None:
        """`node` may not be evicted."""
        if node.offer:
            node.offer = 0
            self._valid -= 1

    def pop(self) -> TreeNode | None:
        """The node to evict now, withdrawn; None when there is none."""
        while self._heap:
            _, offer, node = heapq.heappop(self._heap)
            if node.offer == offer:
                self.withdraw(node)
                return node
        return None
