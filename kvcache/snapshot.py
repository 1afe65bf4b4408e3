"""TreeSnapshot: what a tree holds at one moment, from which another thread makes KV events later.

Public and private pages are published on a socket each, so there is a snapshot of each. The events of a
private page have its name, that of the page before it, and nothing from which its tokens could be guessed.

The tree's thread takes it: a few references per node. That is enough, because what they refer to never
changes: a node's tokens are bytes, its digests a list that a split replaces and does not change, a namespace
is frozen. Encoding events under a lock on the tree was rejected: it would stop the engine a hundred times
longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcache.observer import StorageMedium
from kvcache.radix_key import Namespace
from kvcache.tree_node import TreeNode
from wire.events import AllBlocksCleared, AnyEvent, BlockStored
from wire.page_hash import PageDigest, event_hash, event_hashes, owned_digests

_BATCH_PAGES = 4096  # of a batch of a snapshot, where the number of batches allows it


class NodeImage(NamedTuple):
    """What an event says of a node. All of it is by reference, and never changed in place."""

    namespace: Namespace
    tokens: bytes
    digests: list[PageDigest]
    parent: PageDigest | None  # names the page before the first; None for the first page of a sequence
    tenant: str
    tiers: tuple[StorageMedium, ...]

    @classmethod
    def of(cls, node: TreeNode, page_size: int, secret: bytes) -> NodeImage:
        """The image of a node. `secret`: see owned_digests. On the tree's thread."""
        above = node.parent
        has_parent = above is not None and above.parent is not None
        parent = None
        if above is not None and has_parent:
            (parent,) = owned_digests(above.page_digests(page_size)[-1:], above.tenant, secret)
        digests, tiers = node.page_digests(page_size), tiers_of(node)
        return cls(node.namespace, node.tokens, digests, parent, node.tenant, tiers)

    def stored(self, page_size: int, medium: StorageMedium, secret: bytes) -> BlockStored:
        """The event that announces these pages in a medium."""
        parent = None if self.parent is None else event_hash(self.parent)
        if self.tenant:
            names = event_hashes(owned_digests(self.digests, self.tenant, secret))
            return BlockStored(names, parent, [], page_size, lora_id=None, medium=medium, lora_name=None)
        namespace = self.namespace
        tokens = np.frombuffer(self.tokens, np.int32)
        token_ids: list[Any] = tokens.tolist()
        if namespace.is_bigram:
            token_ids = np.stack((tokens[:-1], tokens[1:]), axis=1).tolist()
        return BlockStored(
            block_hashes=event_hashes(self.digests),
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=page_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[[namespace.extra_key]] * len(self.digests) if namespace.extra_key else None,
            cache_salt=namespace.cache_salt or None,
        )


def tiers_of(node: TreeNode) -> tuple[StorageMedium, ...]:
    """The tiers that have all pages of the node, as events have told."""
    if node.host is None:
        return (StorageMedium.GPU,)
    held = (node.is_resident, not node.host.is_empty, node.host.told_stored)
    return tuple(tier for tier, is_held in zip(StorageMedium, held, strict=True) if is_held)


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """Every public node of a tree, or every private one, parents before children."""

    page_size: int
    nodes: list[NodeImage]
    secret: bytes = b""  # see owned_digests

    def batches(self, at_most: int) -> Iterator[list[AnyEvent]]:
        """Event batches that replace all that a consumer knew: AllBlocksCleared, then every node.

        There is at least one batch and at most `at_most`; the smaller that is, the larger the batches. No
        node is divided, so a node with many pages makes a larger batch, too.
        """
        pages = sum(len(node.digests) * len(node.tiers) for node in self.nodes)
        enough = max(_BATCH_PAGES, -(-pages // at_most))
        batch: list[AnyEvent] = [AllBlocksCleared()]
        filled = 0
        for node in self.nodes:
            batch += [node.stored(self.page_size, tier, self.secret) for tier in node.tiers]
            filled += len(node.digests) * len(node.tiers)
            if filled >= enough:
                yield batch
                batch, filled = [], 0
        if batch:
            yield batch


class TreeSnapshots(NamedTuple):
    """All of a tree at one moment, by the socket on which it is published."""

    public: TreeSnapshot
    private: TreeSnapshot

    @classmethod
    def of(cls, nodes: Iterable[TreeNode], page_size: int, secret: bytes) -> TreeSnapshots:
        """The snapshots of `nodes`, parents before children. On the tree's thread."""
        public: list[NodeImage] = []
        private: list[NodeImage] = []
        for node in nodes:
            (private if node.tenant else public).append(NodeImage.of(node, page_size, secret))
        return cls(TreeSnapshot(page_size, public), TreeSnapshot(page_size, private, secret))
