"""The longest cached prefix of a tenant's key: public pages, and then pages of its own.

    root ── public ── public ── own ── own
      └──── own ───── own (a copy that the tenant had before the pages became public)

Below a public node its public child and the tenant's child are in two slots (kvcache/radix_key.py), and both
may begin with the same page. Below a node of the tenant there are only the tenant's. Another tenant's nodes
are in slots that this look-up never asks for.

A node whose only child is in the public slot is not asked for the tenant's child: so a path costs little more
than one without tenants, per node one dict lookup and one comparison of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcache.radix_key import RadixKey
from kvcache.tree_node import TOKEN_BYTES, TreeNode
from wire.page_hash import owner_key


class MixedPath(NamedTuple):
    """Nodes on the way of a key, and how many of their pages agree with it: the last node may be longer."""

    nodes: list[TreeNode]
    pages: int
    beyond: int  # pages of the last node that do not agree


def mixed_path(key: RadixKey, page_size: int, root: TreeNode, below: TreeNode | None) -> MixedPath:
    """The longest way of `key`; of two the public one. It changes nothing in the tree. `below`: a node on the
    way, or None."""
    lookup = _MixedLookup(key, page_size)
    if below is None or below is root:
        return lookup.follow([], root.children, key.namespace.seed, 0)
    path = below.path()
    return lookup.follow(path, below.children, b"", sum(node.num_pages for node in path))


class _MixedLookup:
    """One key."""

    def __init__(self, key: RadixKey, page_size: int) -> None:
        self._stride = page_size * TOKEN_BYTES
        self._extra = TOKEN_BYTES if key.namespace.is_bigram else 0
        self._pages = len(key) // page_size
        self._raw = key.tokens[: (self._pages * self._stride + self._extra) // TOKEN_BYTES].tobytes()
        self._owner = owner_key(key.tenant)

    def follow(
        self, path: list[TreeNode], children: Mapping[bytes, TreeNode], seed: bytes, pages: int
    ) -> MixedPath:
        """Extend `path`, which has so many pages, to the longest way that begins with one of `children`.
        `seed` is before the first page in the slots of these."""
        raw, stride, extra, owner = self._raw, self._stride, self._extra, self._owner
        at, end, first = pages * stride, self._pages * stride, stride + extra
        beyond = 0
        best = MixedPath([], -1, 0)
        slot = seed + raw[at : at + first]
        while at < end:
            child = children.get(slot)
            if child is None or len(children) > 1:
                own = children.get(owner + slot)
                if own is not None and child is not None:
                    tail = self.follow(path.copy(), {raw[at : at + first]: own}, b"", at // stride)
                    best = max(best, tail, key=lambda way: way.pages)
                elif own is not None:
                    child = own
                elif child is None:
                    break
            path.append(child)
            if not raw.startswith(child.tokens, at):
                same = child.common_pages(raw, at, stride, extra)
                at += same * stride
                beyond = child.num_pages - same
                break
            at += child.num_pages * stride
            children = child.children
            slot = raw[at : at + first]
        found = MixedPath(path, at // stride, beyond)
        return best if best.pages > found.pages else found
