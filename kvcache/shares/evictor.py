"""SharedEvictor: nodes on offer to one component, by tenant; what is above a tenant's share goes first.

A queue per tenant has the tenant's nodes in policy order. Of the tenants' first nodes the one with the lowest
rank is next (pages.py), and of equal ranks the first in policy order:

    above max_share  >  above min_share without these pages  >  above min_share  >  the rest

The queues that may have a node of the second rank are in a heap of queues, by their first nodes. One whose
first node turns out to be guaranteed is set aside until its tenant offers more. So a `pop` costs a few steps
of two heaps, not a step per tenant, as long as any tenant has pages to spare.

Of nodes that were used together a private one goes before a public one, which serves more tenants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.eviction import Evictor, LeafEvictor
from kvcache.shares.pages import Rank, TenantPages
from kvcache.tree_node import TreeNode

MayGo = Callable[[TreeNode], bool]
Order = tuple[int, bool, int]
_LOWEST: Order = (-(1 << 192), False, 0)  # below that of every node
_ORDER, _QUEUE = 0, 2  # in an entry of the heap of queues


@dataclass(slots=True, eq=False)
class _Queue:
    """One tenant's nodes on offer."""

    tenant: str
    nodes: Evictor
    entry: list[Any] | None = None  # its entry in the heap of queues; None: it is set aside, or empty


class SharedEvictor(Evictor):
    """An Evictor that knows tenants. The heap of its base stays empty."""

    heap: type[Evictor] = Evictor
    """What has one tenant's nodes."""

    def __init__(self, policy: str, bit: int, tenants: TenantPages) -> None:
        super().__init__(policy, bit)
        self.expect_copies()
        self._name = policy
        self._tenants = tenants
        self._queues: dict[str, _Queue] = {}
        self._next: list[list[Any]] = []  # [order of its first node, or lower; count of pushes; queue]
        self._aside: dict[_Queue, None] = {}

    def offer(self, node: TreeNode) -> None:
        """See Evictor."""
        if not node.offers & self._bit:
            queue = self._queue(node.tenant)
            queue.nodes.offer(node)
            self._list(queue, self._order(node))

    def touched(self, nodes: Sequence[TreeNode]) -> None:
        """See Evictor."""
        for node in nodes:
            if node.offers & self._bit:
                queue = self._queue(node.tenant)
                queue.nodes.touched([node])
                self._list(queue, self._order(node))

    def withdraw(self, node: TreeNode) -> None:
        """See Evictor."""
        queue = self._queues.get(node.tenant)
        if queue is not None:
            queue.nodes.withdraw(node)

    def pop(self, may_go: MayGo) -> TreeNode | None:
        """The first node of the lowest rank for which `may_go` is true; see Evictor."""
        excessive = [self._queues[one] for one in self._tenants.excessive if one in self._queues]
        queue = self._least(excessive, may_go) or self._spare(may_go) or self._least(self._aside, may_go)
        return None if queue is None else queue.nodes.pop(may_go)

    def pop_of(self, tenant: str, may_go: MayGo) -> TreeNode | None:
        """The tenant's first node; see `pop`."""
        queue = self._queues.get(tenant)
        return None if queue is None else queue.nodes.pop(may_go)

    # -- inside ------------------------------------------------------------------------------------

    def _spare(self, may_go: MayGo) -> _Queue | None:
        """The queue of the first node that its tenant can spare. Those without one are set aside."""
        while self._next:
            entry = self._next[0]
            queue: _Queue = entry[_QUEUE]
            if queue.entry is not entry:  # it was listed again, or is gone
                heapq.heappop(self._next)
                continue
            node = self._first(queue, may_go)
            if node is not None and (order := self._order(node)) > entry[_ORDER]:
                entry[_ORDER] = order
                heapq.heapreplace(self._next, entry)
                continue
            if node is not None and self._rank(node) <= Rank.SPARE:
                return queue
            heapq.heappop(self._next)
            queue.entry = None
            if node is None:
                self._drop(queue)
            else:
                self._aside[queue] = None
        return None

    def _least(self, queues: Iterable[_Queue], may_go: MayGo) -> _Queue | None:
        """Of these queues the one whose first node has the lowest rank, and is first in policy order."""
        ranked: list[tuple[Rank, Order, _Queue]] = []
        for queue in list(queues):
            node = self._first(queue, may_go)
            if node is None:
                self._drop(queue)
            else:
                ranked.append((self._rank(node), self._order(node), queue))
        return min(ranked, key=lambda one: one[:2])[2] if ranked else None

    @staticmethod
    def _first(queue: _Queue, may_go: MayGo) -> TreeNode | None:
        """The node that the queue would pop; it stays on offer."""
        node = queue.nodes.pop(may_go)
        if node is not None:
            queue.nodes.offer(node)
        return node

    def _drop(self, queue: _Queue) -> None:
        """The queue is empty."""
        del self._queues[queue.tenant]
        self._aside.pop(queue, None)
        queue.entry = None

    def _list(self, queue: _Queue, order: Order) -> None:
        """The queue has a node of this order."""
        if queue.entry is None or order < queue.entry[_ORDER]:
            if queue in self._aside:  # it may have nodes before this one
                del self._aside[queue]
                order = _LOWEST
            self._pushed += 1
            queue.entry = [order, self._pushed, queue]
            heapq.heappush(self._next, queue.entry)
            if len(self._next) > 2 * len(self._queues) + 64:  # entries of queues that were listed again
                self._next = [entry for entry in self._next if entry[_QUEUE].entry is entry]
                heapq.heapify(self._next)

    def _queue(self, tenant: str) -> _Queue:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _Queue(tenant, self.heap(self._name, self._bit, tenant))
            queue.nodes.expect_copies()
        return queue

    def _order(self, node: TreeNode) -> Order:
        return self._policy(node), not node.tenant, node.created

    def _rank(self, node: TreeNode) -> Rank:
        """Of the other groups' pages on a node some can be evicted alone."""
        return self._tenants.rank(node.tenant, 1)


class SharedLeafEvictor(SharedEvictor):
    """Of leaves, which are evicted whole; see LeafEvictor."""

    heap = LeafEvictor

    def grown(self, parent: TreeNode, leaf: TreeNode) -> None:
        """See LeafEvictor."""
        queue = self._queue(leaf.tenant)
        assert isinstance(queue.nodes, LeafEvictor)
        if parent.tenant == leaf.tenant:
            queue.nodes.grown(parent, leaf)
            self._list(queue, self._order(leaf))
        else:
            self.withdraw(parent)
            self.offer(leaf)

    def _rank(self, node: TreeNode) -> Rank:
        return self._tenants.rank(node.tenant, node.num_pages)
