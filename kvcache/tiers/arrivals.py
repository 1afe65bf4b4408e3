"""StorageArrivals: what has been read from storage enters the tree.

Pages that were read under public names become public nodes, those that were read under a tenant's its own. No
page changes its visibility by being read: what does not fit the tree any more is free again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvcache.allocator import Pages
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.tenancy.marks import grow_on_host
from kvcache.tenancy.promotion import Promotion
from kvcache.tenancy.visibility import is_superseded
from kvcache.tiers.host_parts import portions
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.prefetch import Prefetch
from kvcache.tree_node import UNKNOWN, TreeNode, shared


class StorageArrivals:
    """One worker's. All methods are called on the tree's thread."""

    def __init__(self, tree: RadixTree, host: HostTier, promotion: Promotion | None) -> None:
        """`promotion` is told of new public nodes, where tenants share."""
        self._tree = tree
        self._host = host
        self._pool = host.pool
        self._parts = host.parts
        self._primary = tree.components[0].name
        self._promotion = promotion

    def enter(self, prefetch: Prefetch, end: int) -> None:
        """Put the first `end` pages into the tree, as far as they are not there yet."""
        ids = {
            group: of[:end].copy() if self._parts[group].is_by_page else of.copy()
            for group, of in prefetch.ids.items()
        }
        for group, part in self._parts.items():
            prefetch.ids[group][: end if part.is_by_page else 1] = 0
        key, border = prefetch.key[: end * self._tree.page_size], min(prefetch.way.public, end)
        path: list[TreeNode] = []
        if border > prefetch.way.start:
            public = {}
            for group, part in self._parts.items():
                length = border if part.is_by_page else 1
                taken = slice(0, border) if part.is_by_page else slice(0, int(border == end))
                public[group] = np.zeros(length, np.int32)
                public[group][taken] = ids[group][taken]
                ids[group][taken] = 0
            path = self._enter_part(public_key(key[: border * self._tree.page_size]), public, border)
        if border < end:
            path = self._enter_part(key, ids, end)
        if prefetch.users:
            prefetch.keep(path)

    def _enter_part(self, key: RadixKey, ids: Mapping[str, Pages], end: int) -> list[TreeNode]:
        """Put pages of one visibility there, the key's. Returns its path then; [] if what they continue has
        gone meanwhile, or may not grow."""
        tree = self._tree
        path, tokens = tree.walk(key)
        cached = tokens // tree.page_size
        new = np.flatnonzero(ids[self._primary])
        may_grow = not (tree.shares and path and is_superseded(tree, path[-1]))
        if cached < end and not key.tenant and self._promotion is not None:
            may_grow = not self._promotion.demotion.withholds(key)
        if cached < (int(new[0]) if len(new) else end) or (cached < end and not may_grow):
            self._pool.free(ids)
            return []
        if cached < end:
            path += grow_on_host(tree, path[-1] if path else tree.root, key, cached, end)
            if not key.tenant and self._promotion is not None:
                shared(path[-1]).founders = UNKNOWN
                self._promotion.arrived(path[-1])
        begin, stop = self._first(ids, end), 0
        for node in path:
            start, stop = stop, stop + node.num_pages
            if stop <= begin:
                continue
            part = portions(self._parts, ids, start, stop, end)
            if node.tenant == key.tenant:
                self._fill(node, part)
            else:  # of a tenant's pages what has become public meanwhile: they were read under its own names
                self._pool.free(part)
        return path

    def _first(self, ids: Mapping[str, Pages], end: int) -> int:
        """The first page of which something has come. A long prompt comes in many parts."""
        firsts = [
            int(np.flatnonzero(of)[0]) if self._parts[group].is_by_page else end - 1
            for group, of in ids.items()
            if of.any()
        ]
        return min(firsts, default=end)

    def _fill(self, node: TreeNode, ids: Mapping[str, Pages]) -> None:
        """Give the node's host copy what it lacks of `ids`; the rest is free again."""
        if node.host is None or node.host.moving:
            self._pool.free(ids)
            return
        taken, surplus = {}, {}
        for group, arrived in ids.items():
            lacks = self._parts[group].on_host([node]) == 0
            taken[group] = np.where(lacks, arrived, 0).astype(np.int32)
            surplus[group] = np.where(lacks, 0, arrived).astype(np.int32)
        self._pool.free(surplus)
        self._host.landed(node, taken, is_stored=True)


def public_key(key: RadixKey) -> RadixKey:
    """Everybody's key of the same tokens."""
    return RadixKey(key.tokens, key.namespace)
