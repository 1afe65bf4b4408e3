"""EventRecorder: turns what the tree does into KV events, in a bounded queue.

Events that nobody takes in time are not lost silently. On overflow the queue is dropped, and the next
`take_events` says AllBlocksCleared and then everything that is cached: long, but true.

One BlockStored covers all pages of a node: its hashes are chained in order and the parent is the page before
the first. An event per page, which some engines send, would say the same in many more bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvcache.tree_node import TreeNode
from wire.events import AllBlocksCleared, AnyEvent, BlockRemoved, BlockStored
from wire.page_hash import event_hash

DEVICE_MEDIUM = "GPU"  # what consumers call the tier that attention reads, whatever the device is


class EventRecorder:
    """A TreeObserver. All on the tree's thread."""

    def __init__(self, page_size: int, max_events: int = 100_000) -> None:
        self._page_size = page_size
        self._max_events = max_events
        self._events: list[AnyEvent] = []
        self._overflowed = False
        self.overflows = 0

    def stored(self, node: TreeNode) -> None:
        """Record a new node."""
        if self._has_room():
            self._events.append(self._stored_event(node))

    def removed(self, node: TreeNode) -> None:
        """Record that a node goes."""
        if self._has_room():
            hashes = [event_hash(digest) for digest in node.page_digests(self._page_size)]
            self._events.append(BlockRemoved(hashes, DEVICE_MEDIUM))

    def cleared(self) -> None:
        """Record a reset. What was queued before it no longer matters, nor does an overflow."""
        self._overflowed = False
        self._events = [AllBlocksCleared()]

    def take_events(self, nodes: Iterable[TreeNode]) -> list[AnyEvent]:
        """What was recorded since the last call. `nodes` is what the tree holds now, parents first."""
        if self._overflowed:
            self._overflowed = False
            return self.snapshot(nodes)
        events, self._events = self._events, []
        return events

    def snapshot(self, nodes: Iterable[TreeNode]) -> list[AnyEvent]:
        """Events that replace whatever a consumer believed by what `nodes` hold."""
        return [AllBlocksCleared(), *(self._stored_event(node) for node in nodes)]

    def _has_room(self) -> bool:
        if not self._overflowed and len(self._events) >= self._max_events:
            self._overflowed = True
            self.overflows += 1
            self._events = []
        return not self._overflowed

    def _stored_event(self, node: TreeNode) -> BlockStored:
        namespace = node.namespace
        digests = node.page_digests(self._page_size)
        parent = node.parent
        has_parent = parent is not None and parent.parent is not None
        tokens = node.token_array()
        token_ids: list[Any] = tokens.tolist()
        if namespace.is_bigram:
            token_ids = np.stack((tokens[:-1], tokens[1:]), axis=1).tolist()
        return BlockStored(
            block_hashes=[event_hash(digest) for digest in digests],
            parent_block_hash=event_hash(parent.page_digests(self._page_size)[-1])
            if parent is not None and has_parent
            else None,
            token_ids=token_ids,
            block_size=self._page_size,
            lora_id=None,
            medium=DEVICE_MEDIUM,
            lora_name=None,
            extra_keys=[[namespace.extra_key]] * len(digests) if namespace.extra_key else None,
            cache_salt=namespace.cache_salt or None,
        )
