"""Nodes that were one when a move began. A split leaves the last part its identity."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.tree_node import TreeNode


def pieces(node: TreeNode, pages: int) -> Iterator[tuple[TreeNode, int, int]]:
    """The nodes that are now the last `pages` pages up to the end of `node`, with their pages' places."""
    end = pages
    while end > 0:
        yield node, end - node.num_pages, end
        end -= node.num_pages
        assert node.parent is not None, "the root is part of no move"
        node = node.parent
    assert end == 0, "a move begins at the border of a node"
