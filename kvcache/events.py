"""EventRecorder: turns what the tree does into KV events, in a bounded queue.

Events that are not taken in time are not lost silently. When the queue is full it is dropped, and the next
`take_events` returns AllBlocksCleared and then everything that is cached.

One BlockStored covers all pages of a node: its hashes are chained in order and the parent is the page before
the first. An event per page, which some engines send, would say the same in many more bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvcache.observer import StorageMedium
from kvcache.snapshot import NodeImage, TreeSnapshot
from kvcache.tree_node import TreeNode
from wire.events import AnyEvent, BlockRemoved
from wire.page_hash import event_hashes, owned_digests

log = logging.getLogger(__name__)


class EventRecorder:
    """A TreeObserver. All on the tree's thread."""

    def __init__(self, page_size: int, max_events: int = 100_000) -> None:
        self._page_size = page_size
        self._max_events = max_events
        self._events: list[AnyEvent] = []
        self._overflowed = False

    def stored(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record that a node is in a tier."""
        if self._has_room():
            self._events.append(NodeImage.of(node, self._page_size).stored(self._page_size, medium))

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record that a node leaves a tier."""
        if self._has_room():
            digests = owned_digests(node.page_digests(self._page_size), node.tenant)
            self._events.append(BlockRemoved(event_hashes(digests), medium))

    def take_events(self, nodes: Iterable[TreeNode]) -> list[AnyEvent]:
        """What was recorded since the last call. `nodes`: all of the tree now, parents before children."""
        if self._overflowed:
            self._overflowed = False
            return next(TreeSnapshot.of(nodes, self._page_size).batches(at_most=1))
        events, self._events = self._events, []
        return events

    def _has_room(self) -> bool:
        if not self._overflowed and len(self._events) >= self._max_events:
            self._overflowed = True
            log.warning("kv events: %d were not taken in time; a snapshot replaces them", self._max_events)
            self._events = []
        return not self._overflowed
