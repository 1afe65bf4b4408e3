"""Second chances: how often a node stays when it would be evicted, as another worker asked for its pages.

A decode worker has what prefill workers have computed. As long as they have it too, it may go. When one of
them asks for it, that one has lost it, and what it fetches is a copy, which it evicts first: so the lender's
pages are those that last. A node has few chances and uses them up (as in GCLOCK, Smith 1978): what nobody
asks for any more is evicted in the end.
"""

from __future__ import annotations

from kvcache.tree_node import ALL_CHANCES, ONE_CHANCE, TreeNode


def give_chances(last: TreeNode) -> None:
    """Give all nodes of the path that ends at `last` as many chances as a node can have."""
    for node in last.path():
        if not node.is_copy:
            node.offers |= ALL_CHANCES


def use_chance(leaf: TreeNode, tick: int) -> None:
    """Keep `leaf`, which has chances, once more, as if it had been used now, with what has chances above."""
    node: TreeNode | None = leaf
    while node is not None and node.offers & ALL_CHANCES:
        node.offers -= ONE_CHANCE
        node.last_access = tick
        node = node.parent
