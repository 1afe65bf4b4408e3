"""What is public, what is private, and how much each is used: for reports of a worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache.radix_tree import RadixTree
from kvcache.tenancy.promotion import Promotion
from kvcache.tree_node import TreeNode

PUBLIC, PRIVATE = "public", "private"


@dataclass(frozen=True)
class SharingReport:
    """Pages of the primary group and nodes since the start; and by visibility sums over the nodes that are
    there: `nodes`, `tokens`, and their counters (kvcache/tenancy/usage.py)."""

    public_pages: int = 0  # have become public
    merged_copies: int = 0  # nodes that gave way to others
    visibilities: dict[str, dict[str, int]] = field(default_factory=dict)


def visibility(node: TreeNode) -> str:
    """Whose requests may use a node: everybody's, or its owner's."""
    return PRIVATE if node.tenant else PUBLIC


def sharing_report(tree: RadixTree, promotion: Promotion | None) -> SharingReport:
    """A report of all zeros where tenants do not share."""
    if promotion is None:
        return SharingReport()
    sums: dict[str, Counter[str]] = {PUBLIC: Counter(), PRIVATE: Counter()}
    for node in tree.nodes():
        of = sums[visibility(node)]
        of.update({"nodes": 1, "tokens": node.num_tokens, **promotion.usage.of(node)._asdict()})
    by_visibility = {name: dict(of) for name, of in sums.items() if of}
    return SharingReport(promotion.public_pages, promotion.merged_copies, by_visibility)


def counters(promotion: Promotion | None, node: TreeNode) -> dict[str, int]:
    """A node's counters by name; empty where tenants do not share."""
    return {} if promotion is None else promotion.usage.of(node)._asdict()
