"""The longest cached prefix of a tenant's key: public pages, and then pages of its own.

    root ── public ── public ── own ── own
      └──── own ───── own (a copy that the tenant had before the pages became public)

Below a public node its public child and the tenant's child are in two slots (kvcache/radix_key.py), and both
may begin with the same page. Below a node of the tenant there are only the tenant's. Another tenant's nodes
are in slots that this look-up never asks for.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcache.radix_key import RadixKey
from kvcache.tree_node import TOKEN_BYTES, TreeNode
from wire.page_hash import owner_key


def mixed_path(
    key: RadixKey, page_size: int, root: TreeNode, below: TreeNode | None
) -> tuple[list[TreeNode], int]:
    """The nodes, and how many pages of them agree with the key: the last node may be longer. `below`: a node
    on the path, or None."""
    path = [] if below is None else below.path()
    start = sum(node.num_tokens for node in path) * TOKEN_BYTES
    more = _MixedLookup(key, page_size).below(below or root, start)
    return path + more.nodes, more.end // (page_size * TOKEN_BYTES)


class _Found(NamedTuple):
    """Nodes, and the byte of the key up to which they agree with it; the last node may be longer."""

    nodes: list[TreeNode]
    end: int


class _MixedLookup:
    """One look-up. It changes nothing in the tree."""

    def __init__(self, key: RadixKey, page_size: int) -> None:
        self._stride = page_size * TOKEN_BYTES
        self._extra = TOKEN_BYTES if key.namespace.is_bigram else 0
        self._end = len(key) // page_size * self._stride  # of the key's whole pages
        self._raw = key.tokens[: (self._end + self._extra) // TOKEN_BYTES].tobytes()
        self._seed = key.namespace.seed
        self._owner = owner_key(key.tenant)

    def below(self, node: TreeNode, at: int) -> _Found:
        """The longest path below `node`, where byte `at` of the key is next; of two the public one."""
        path: list[TreeNode] = []
        best = _Found([], -1)
        while at < self._end and not node.tenant:
            slot = self._raw[at : at + self._stride + self._extra]
            if node.parent is None:
                slot = self._seed + slot
            public, own = node.children.get(slot), node.children.get(self._owner + slot)
            if own is not None:
                tail = self._along(own, at)
                if tail.end > best.end:
                    best = _Found([*path, *tail.nodes], tail.end)
            if public is None:
                break
            path.append(public)
            node, start = public, at
            at = self._through(public, start)
            if at - start < public.num_tokens * TOKEN_BYTES:
                break
        if node.tenant:
            return self._own_only(node, at)
        return best if best.end > at else _Found(path, at)

    def _own_only(self, node: TreeNode, at: int) -> _Found:
        """Below a node of the tenant."""
        child = node.children.get(self._raw[at : at + self._stride + self._extra]) if at < self._end else None
        return self._along(child, at) if child is not None else _Found([], at)

    def _along(self, child: TreeNode | None, at: int) -> _Found:
        """The path that begins with `child`, a node of the tenant."""
        path: list[TreeNode] = []
        while child is not None:
            path.append(child)
            start, at = at, self._through(child, at)
            if at - start < child.num_tokens * TOKEN_BYTES or at >= self._end:
                break
            child = child.children.get(self._raw[at : at + self._stride + self._extra])
        return _Found(path, at)

    def _through(self, node: TreeNode, at: int) -> int:
        """Where the key leaves `node`, whose first page agrees with it at byte `at`."""
        if self._raw.startswith(node.tokens, at):
            return at + node.num_tokens * TOKEN_BYTES
        return at + node.common_pages(self._raw, at, self._stride, self._extra) * self._stride
