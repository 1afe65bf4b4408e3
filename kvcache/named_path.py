"""The cached prefix of a tenant's key where tenants share nothing but what the operator has named.

    root ── public, as far as it is named ── own ── own
      └──── own ── own (a copy from a time when other prefixes were named)

What is public beyond the named pages is of requests without a tenant, and not followed. Where the tenant has
pages of its own, they are its way: all tenants' pages are computed under the same list of prefixes, so below
named pages it has them only from a time of another list.
"""

from __future__ import annotations

from kvcache.radix_key import RadixKey
from kvcache.tree_node import TOKEN_BYTES, TreeNode
from wire.page_hash import owner_key


def named_path(
    key: RadixKey, page_size: int, root: TreeNode, below: TreeNode | None
) -> tuple[list[TreeNode], int]:
    """The nodes, and how many of their pages agree with the key and may be used: the last node may be longer.
    `below`: a node on the path, or None."""
    stride, owner = page_size * TOKEN_BYTES, owner_key(key.tenant)
    extra = TOKEN_BYTES if key.namespace.is_bigram else 0
    end, limit = len(key) // page_size * stride, key.public_pages(page_size) * stride
    raw = key.tokens[: (end + extra) // TOKEN_BYTES].tobytes()
    node = below or root
    path = node.path()
    at = sum(one.num_pages for one in path) * stride
    while at < end:
        slot = raw[at : at + stride + extra]
        if node.parent is None:
            slot = key.namespace.seed + slot
        if node.tenant:
            child = node.children.get(slot)
        else:
            child = node.children.get(owner + slot)
            if child is None and at < limit:
                child = node.children.get(slot)
        if child is None:
            break
        path.append(child)
        start, node = at, child
        at += child.common_pages(raw, at, stride, extra) * stride
        if not child.tenant:
            at = min(at, limit)
        if at - start < child.num_pages * stride:
            break
    return path, at // stride
