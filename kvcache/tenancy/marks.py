"""Marks: pages that are public by the operator's word, and pages that are private for ever.

    0 ............. public_pages ............. private_page ............. end of the key
    named by the operator:       the tenant's, and public once      the tenant's, for ever:
    everybody's at once          enough others have them            permanently_private

A key's new pages become a node for each of these parts: those of the first are appended as everybody's, and
the node of the rest is cut where the third begins. What the operator has named is public whatever the request
says: its text is known. A node below a private one is private, too, and below a permanently private one it is
that for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvcache.allocator import NO_PAGES, Pages
from kvcache.radix_key import RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.tree_node import FINAL, TreeNode


class _Part(NamedTuple):
    """Pages of a key from where the part before ended up to page `end`."""

    end: int
    key: RadixKey  # whose they are


def _parts(key: RadixKey, page_size: int, parent: TreeNode, start: int, end: int) -> Iterator[_Part]:
    """The parts of pages [start, end), which are new below `parent`."""
    public = key.public_pages(page_size) if not parent.tenant else start
    border = min(max(public, start), end)
    if start < border:
        yield _Part(border, key.everybodys())
    if border < end:
        yield _Part(end, key)


def grow(
    tree: RadixTree,
    parent: TreeNode,
    key: RadixKey,
    pages: Pages,
    start: int,
    priority: int,
    offers: Mapping[str, Pages],
    is_copy: bool,
) -> list[TreeNode]:
    """RadixTree.append, in parts: the new nodes, each below the one before. `keep_private` marks them."""
    inner = {c.name: offers.get(c.name, NO_PAGES) for c in tree.others if not c.tells_ends}
    nodes: list[TreeNode] = []
    for part in _parts(key, tree.page_size, parent, start, len(pages)):
        given = offers if part.end == len(pages) else inner
        parent = tree.append(parent, part.key, pages[: part.end], start, priority, given, is_copy)
        nodes.append(parent)
        start = part.end
    return nodes


def grow_on_host(tree: RadixTree, parent: TreeNode, key: RadixKey, start: int, end: int) -> list[TreeNode]:
    """RadixTree.append_host, in parts. All of them are the key's: what is read from storage stays as visible
    as its names there."""
    nodes: list[TreeNode] = []
    border = min(max(key.private_page(tree.page_size), start), end)
    for first, last in ((start, border), (border, end)):
        if first < last:
            parent = tree.append_host(parent, key, first, last)
            parent.offers |= FINAL if first == border else 0
            nodes.append(parent)
    return nodes


def may_be_given(tree: RadixTree, key: RadixKey, below: TreeNode | None) -> bool:
    """Whether the device pages of a request may be cached: not if public nodes that are on the host alone
    would get pages that are private for ever. `below`: see RadixTree.walk."""
    if key.marks.private_from is None or tree.lower is None:
        return True
    first, end = key.private_page(tree.page_size), 0
    for node in tree.walk(key, below=below)[0]:
        end += node.num_pages
        if not node.tenant and not node.is_resident and end > first:
            return False
    return True


def given_to(
    tree: RadixTree, key: RadixKey, path: Sequence[TreeNode], offers: Mapping[str, Pages]
) -> dict[str, Pages]:
    """What of `offers` the nodes of `path`, which are in the tree, may get: public nodes get nothing of pages
    that the key wants private for ever."""
    first, end = key.private_page(tree.page_size), 0
    given = dict(offers)
    for node in path:
        start, end = end, end + node.num_pages
        if node.tenant or end <= first:
            continue
        for component in tree.others:
            offer = given.get(component.name, NO_PAGES)
            if len(offer) and not component.tells_ends:  # a state goes to the end of a key alone
                kept = offer.copy()
                kept[max(start, first) : end] = 0
                given[component.name] = kept
    return given


def withholds(tree: RadixTree, key: RadixKey, below: TreeNode | None, group: str, offer: Pages) -> bool:
    """Whether public nodes on the way of `key` lack something that is in a request's offer of a group, and do
    not get it. `below`: see RadixTree.walk."""
    component = next(one for one in tree.others if one.name == group)
    if key.marks.private_from is None or component.tells_ends:
        return False
    path, _ = tree.walk(key, below=below)
    if not path:
        return False
    held = component.gather(path)
    offer = offer[: len(held)]
    withheld = offer != given_to(tree, key, path, {group: offer})[group]
    return bool((withheld & (held == 0)).any())


def keep_private(tree: RadixTree, key: RadixKey, path: Sequence[TreeNode]) -> list[TreeNode]:
    """Mark what a path has of the tenant's own pages that `key` wants private for ever. The path, in which a
    node may have been split."""
    if not path or key.marks.private_from is None:
        return list(path)
    tree.cut(list(path), key.private_page(tree.page_size))
    split = path[-1].path()
    end = 0
    for node in split:
        if node.tenant and end >= key.private_page(tree.page_size):
            mark(node)
        end += node.num_pages
    return split


def keep_found_private(tree: RadixTree, key: RadixKey, below: TreeNode | None) -> None:
    """The same for what is cached of a key to which nothing is added. `below`: see RadixTree.walk."""
    if key.marks.private_from is not None:
        keep_private(tree, key, tree.walk(key, below=below)[0])


def mark(node: TreeNode) -> None:
    """`node`, and with it all that is below it, is private for ever."""
    stack = [node]
    while stack:
        one = stack.pop()
        if not one.permanently_private:
            one.offers |= FINAL
            stack += one.children.values()
