"""The tree as text, for a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcache.components.base import TreeComponent
from kvcache.tree_node import TreeNode

SHOWN_TOKENS = 8


def tree_lines(nodes: Iterable[TreeNode], components: Sequence[TreeComponent]) -> list[str]:
    """One line per node, indented by depth: its first tokens, what each component holds, locks, hits."""
    lines = []
    for node in nodes:
        tokens = node.token_array()
        shown = " ".join(map(str, tokens[:SHOWN_TOKENS])) + (" ..." if len(tokens) > SHOWN_TOKENS else "")
        held = " ".join(component.describe(node) for component in components)
        lines.append(
            f"{'  ' * len(node.path())}{node.num_tokens} tokens [{shown}] {held} "
            f"lock={node.lock_ref} hits={node.hit_count}"
        )
    return lines
