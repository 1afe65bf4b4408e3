"""EventRecorder: turns what the tree does into KV events, in two bounded queues: public pages, private pages.

Events that are not taken in time are not lost silently. When a queue is full it is dropped, and the next
`take_events` returns, for that queue, AllBlocksCleared and then everything of its kind that is cached. The
same happens to private pages when the secret under which they are named has been replaced.

One BlockStored covers all pages of a node: its hashes are chained in order and the parent is the page before
the first. An event per page, which some engines send, would say the same in many more bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from common.secrets import ClusterSecret, secret_in_use
from kvcache.observer import StorageMedium
from kvcache.snapshot import NodeImage, TreeSnapshot, TreeSnapshots
from kvcache.tree_node import TreeNode
from wire.events import AnyEvent, BlockRemoved
from wire.page_hash import event_hashes, owned_digests

log = logging.getLogger(__name__)


class TreeEvents(NamedTuple):
    """What a tree did, by the socket on which it is published. The two lists have no common order."""

    public: list[AnyEvent]
    private: list[AnyEvent]


class EventRecorder:
    """A TreeObserver. All on the tree's thread."""

    def __init__(
        self, page_size: int, max_events: int = 100_000, secret: ClusterSecret | None = None
    ) -> None:
        """`max_events`: of each queue. `secret`: the cluster's; another thread refreshes it."""
        self._page_size = page_size
        self._cluster = secret
        self._secret = secret_in_use(secret)  # with which private pages are named now
        self._public = _Queue(max_events)
        self._private = _Queue(max_events)

    def stored(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record that a node is in a tier."""
        queue = self._private if node.tenant else self._public
        if queue.has_room():
            image = NodeImage.of(node, self._page_size, self._secret)
            queue.events.append(image.stored(self._page_size, medium, self._secret))

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record that a node leaves a tier."""
        queue = self._private if node.tenant else self._public
        if queue.has_room():
            digests = owned_digests(node.page_digests(self._page_size), node.tenant, self._secret)
            queue.events.append(BlockRemoved(event_hashes(digests), medium))

    def take_events(self, nodes: Iterable[TreeNode]) -> TreeEvents:
        """What was recorded since the last call. `nodes`: all of the tree now, parents before children."""
        secret = secret_in_use(self._cluster)
        if secret != self._secret:
            self._secret = secret
            self._private.drop()
        if not (self._public.dropped or self._private.dropped):
            return TreeEvents(self._public.take(), self._private.take())
        now = self.snapshot(nodes)
        return TreeEvents(self._public.take(now.public), self._private.take(now.private))

    def snapshot(self, nodes: Iterable[TreeNode]) -> TreeSnapshots:
        """All of the tree now, under the names that events have told."""
        return TreeSnapshots.of(nodes, self._page_size, self._secret)


class _Queue:
    """The events of one socket."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self.events: list[AnyEvent] = []
        self.dropped = False  # a snapshot replaces them

    def has_room(self) -> bool:
        """Whether an event is to be recorded. A full queue is dropped."""
        if not self.dropped and len(self.events) >= self._max_events:
            log.warning("kv events: %d were not taken in time; a snapshot replaces them", self._max_events)
            self.drop()
        return not self.dropped

    def drop(self) -> None:
        """Forget what was recorded."""
        self.dropped = True
        self.events = []

    def take(self, snapshot: TreeSnapshot | None = None) -> list[AnyEvent]:
        """What was recorded since the last call, or the snapshot if that was dropped."""
        if self.dropped:
            assert snapshot is not None, "what was dropped is replaced"
            self.dropped = False
            return next(snapshot.batches(at_most=1))
        events, self.events = self.events, []
        return events
