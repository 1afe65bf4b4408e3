"""A private node becomes public, and copies of the same pages become one.

    is_superseded   a path leads through a copy of what is public now
    give            a node has another owner from now on
    publish   a node's pages are everybody's; its children stay their owners', in slots that name the owner
    unpublish   its inverse, for a node and all below it: they get owners whom no request can name
    fold      `copy` and `kept` begin with the same pages: of those the copy's go, and what is below them goes
              below the kept ones

A copy goes once nothing locks it on any tier. What the kept pages lack on the device they take over, and
their counters are added. But public pages take over nothing of a copy that is private for ever: that one only
goes, as if it were evicted. Of two nodes of one owner, one of which is private for ever, the kept one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.observer import StorageMedium
from kvcache.radix_key import OWNER_BYTES
from kvcache.radix_tree import RadixTree
from kvcache.snapshot import tiers_of
from kvcache.tenancy.marks import mark
from kvcache.tenancy.usage import NodeUsage
from kvcache.tree_node import NO_FOUNDERS, TOKEN_BYTES, TreeNode, shared
from wire.page_hash import tenant_of_key


def is_superseded(tree: RadixTree, last: TreeNode) -> bool:
    """Whether the path of `last` leads through a private copy of pages that are public now.

    Nothing is added below such a copy. What its owner asks for meanwhile may be added below the public pages,
    and the tree would have one tenant's page twice, under one name.
    """
    node = last
    while node.tenant and node.parent is not None:
        above = node.parent
        if not above.tenant:
            return node.child_key(tree.page_size)[OWNER_BYTES:] in above.children
        node = above
    return False


def publish(tree: RadixTree, node: TreeNode, founders: tuple[str, ...]) -> None:
    """Make `node` public. Its parent is, and has no public child with the same first page. `founders` have
    computed its pages, each for itself."""
    parent, size = node.parent, tree.page_size
    assert parent is not None, "the root is public"
    assert not parent.tenant, "a public node has a public parent"
    assert not node.permanently_private, "what is private for ever becomes public"
    if tree.lower is not None:
        tree.lower.renaming(node)
    tiers = tiers_of(node)
    for observer in tree.observers:
        for tier in tiers:
            observer.removed(node, tier)
    del parent.children[node.child_key(size)]
    give(tree, node, "")
    shared(node).founders = founders
    slot = node.child_key(size)
    assert slot not in parent.children, "two public nodes begin with the same page"
    parent.children[slot] = node
    node.children = {child.child_key(size): child for child in node.children.values()}
    for observer in tree.observers:
        for tier in tiers:
            observer.stored(node, tier)


def give(tree: RadixTree, node: TreeNode, tenant: str) -> None:
    """`node` is the tenant's from now on. Its slot among its parent's children is the caller's to change, and
    observers are the caller's to tell."""
    counted = [component for component in tree.components if component.tenants is not None]
    for component in counted:
        component.give(node, tenant)
        component.evictor.withdraw(node)
    node.tenant = tenant
    for component in counted:
        if node.is_resident and component.may_evict(node):
            component.evictor.offer(node)


def unpublish(tree: RadixTree, top: TreeNode, new_owner: Callable[[], str]) -> None:
    """Take `top`, which is public, and all below it from everybody: each owner's pages, and everybody's, get
    a new owner. A tenant may have the same pages again elsewhere, so its own do not keep their names."""
    parent, size = top.parent, tree.page_size
    assert parent is not None, "the root is public"
    nodes = [top, *top.descendants()]
    if tree.lower is not None:
        for node in nodes:
            tree.lower.withdrawing(node)
    for observer in tree.observers:
        for node in reversed(nodes):
            for tier in tiers_of(node):
                observer.removed(node, tier)
    del parent.children[top.child_key(size)]
    owners: dict[str, str] = {}
    for node in nodes:
        if node.tenant not in owners:
            owners[node.tenant] = new_owner()
        give(tree, node, owners[node.tenant])
        shared(node).founders = NO_FOUNDERS
    for node in nodes:
        node.children = {child.child_key(size): child for child in node.children.values()}
    parent.children[top.child_key(size)] = top
    for observer in tree.observers:
        for node in nodes:
            for tier in tiers_of(node):
                observer.stored(node, tier)


def discard(tree: RadixTree, node: TreeNode) -> None:
    """Remove a node that nothing locks and that has no children, from all tiers but storage."""
    parent = node.parent
    assert parent is not None, "the root is never removed"
    if node.is_resident:
        tree.leave_device(node)
    tree.remove(node)
    if parent.is_resident:
        tree.settle(parent)


def is_in_tree(tree: RadixTree, node: TreeNode) -> bool:
    """Whether the node has not been removed, nor one above it."""
    size = tree.page_size
    while node.parent is not None:
        if node.parent.children.get(node.child_key(size)) is not node:
            return False
        node = node.parent
    return node is tree.root


def is_settled(node: TreeNode) -> bool:
    """Whether no move on a lower tier reads or writes the node under its present name."""
    return node.host is None or not (node.host.locks or node.host.moving)


def fold(tree: RadixTree, usage: NodeUsage, copy: TreeNode, kept: TreeNode) -> bool:
    """Let the pages of `copy` that `kept` has, too, and what both have below them, give way if nothing holds
    them. Whether they have: otherwise all stay.

    They are below parents with the same tokens; the copy is private, and `kept` is public or the same
    owner's.
    """
    pairs = []
    for pair in _common_nodes(tree, copy, kept):
        if not pair.may_merge():
            return False
        pairs.append(pair)
    _hand_over(tree, [pair for pair in pairs if pair.copy.is_resident and not pair.kept.is_resident])
    for pair in reversed(pairs):
        _merge(tree, usage, pair)
    return True


class _Pair(NamedTuple):
    """Two nodes with the same tokens, below parents with the same tokens."""

    copy: TreeNode
    kept: TreeNode

    @property
    def gives(self) -> bool:
        """Whether `kept` may have what the copy has on the device, and its counters."""
        return bool(self.kept.tenant) or not self.copy.permanently_private

    def may_merge(self) -> bool:
        """What is below the copy may be on the device: then `kept` has to be there."""
        copy, kept = self
        stays_resident = not copy.is_resident or kept.is_resident or self.gives
        return stays_resident and not copy.lock_ref and is_settled(copy)


def _common_nodes(tree: RadixTree, copy: TreeNode, kept: TreeNode) -> Iterator[_Pair]:
    """These two, cut where their common pages end, and what both have below, parents first."""
    left = [(copy, kept)]
    while left:
        copy, kept = left.pop()
        pages = _common_pages(tree, copy, kept)
        (copy,), (kept,) = tree.cut([copy], pages), tree.cut([kept], pages)
        yield _Pair(copy, kept)
        for child in copy.children.values():
            other = kept.children.get(child.child_key(tree.page_size, kept))
            if other is not None:
                left.append((child, other))


def _hand_over(tree: RadixTree, pairs: Sequence[_Pair]) -> None:
    """What the copies have on the device becomes the kept nodes', which are not resident. `pairs`: parents
    first, as the parent of a resident node is resident."""
    for observer in tree.observers:
        for copy, _ in reversed(pairs):
            observer.removed(copy, StorageMedium.GPU)
    for copy, kept in pairs:
        for component in tree.components:
            component.hand_over(copy, kept)
            component.evictor.withdraw(copy)
        for node, change in ((copy, -1), (kept, 1)):
            assert node.parent is not None, "the root has no copy"
            node.parent.resident_children += change
    for observer in tree.observers:
        for _, kept in pairs:
            observer.stored(kept, StorageMedium.GPU)


def _merge(tree: RadixTree, usage: NodeUsage, pair: _Pair) -> None:
    """Remove a copy below which nothing is that `kept` has below it."""
    copy, kept = pair
    if pair.gives:
        for component in tree.components:
            component.hand_over(copy, kept)
        usage.merge(copy, kept)
    owner, _ = tenant_of_key(copy.tenant)
    if kept.founders and owner not in kept.founders and len(kept.founders) < usage.most_users:
        shared(kept).founders = (*kept.founders, owner)
    if kept.tenant and copy.permanently_private:
        mark(kept)
    moved = list(copy.children.values())
    for child in moved:
        child.parent = kept
        kept.children[child.child_key(tree.page_size)] = child
        if kept.permanently_private:
            mark(child)
    if kept.is_copy:
        for component in tree.components:
            component.evictor.touched(moved)  # below a copy some go first: their keys are smaller now
    kept.resident_children += copy.resident_children
    copy.children, copy.resident_children = {}, 0
    if copy.is_resident:
        tree.leave_device(copy)
    tree.remove(copy)


def _common_pages(tree: RadixTree, one: TreeNode, other: TreeNode) -> int:
    """At least 1: the nodes are in slots of the same page."""
    extra = TOKEN_BYTES if one.namespace.is_bigram else 0
    shorter = min(len(one.tokens), len(other.tokens))
    mine, theirs = (np.frombuffer(node.tokens[:shorter], np.int32) for node in (one, other))
    differs = np.flatnonzero(mine != theirs)
    same = int(differs[0]) * TOKEN_BYTES if len(differs) else shorter
    return (same - extra) // (tree.page_size * TOKEN_BYTES)
