"""What is public, what is private, and how much each is used: for reports of a worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache.radix_tree import RadixTree
from kvcache.tenancy.promotion import Promotion
from kvcache.tree_node import TreeNode

PUBLIC, PRIVATE, DEMOTED = "public", "private", "demoted"


@dataclass(frozen=True)
class SharingReport:
    """Pages of the primary group and nodes since the start; and by visibility sums over the nodes that are
    there: `nodes`, `tokens`, and their counters (kvcache/tenancy/usage.py)."""

    public_pages: int = 0  # have become public
    merged_copies: int = 0  # nodes that gave way to others
    demoted_pages: int = 0  # have stopped being public
    visibilities: dict[str, dict[str, int]] = field(default_factory=dict)


def visibility(promotion: Promotion | None, node: TreeNode) -> str:
    """Whose requests may find a node: everybody's, its owner's, or nobody's."""
    if promotion is not None and promotion.demotion.holds(node):
        return DEMOTED
    return PRIVATE if node.tenant else PUBLIC


def sharing_report(tree: RadixTree, promotion: Promotion | None) -> SharingReport:
    """A report of all zeros where tenants do not share."""
    if promotion is None:
        return SharingReport()
    sums: dict[str, Counter[str]] = {name: Counter() for name in (PUBLIC, PRIVATE, DEMOTED)}
    for node in tree.nodes():
        of = sums[visibility(promotion, node)]
        of.update({"nodes": 1, "tokens": node.num_tokens, **promotion.usage.of(node)._asdict()})
    by_visibility = {name: dict(of) for name, of in sums.items() if of}
    return SharingReport(
        promotion.public_pages, promotion.merged_copies, promotion.demotion.demoted_pages, by_visibility
    )


def counters(promotion: Promotion | None, node: TreeNode) -> dict[str, int]:
    """A node's counters by name; empty where tenants do not share."""
    return {} if promotion is None else promotion.usage.of(node)._asdict()
