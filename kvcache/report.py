"""The tree for a program (`node_reports`) and for a person (`pretty_print`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.radix_tree import RadixTree
from kvcache.snapshot import tiers_of
from kvcache.tenancy.promotion import Promotion
from kvcache.tenancy.report import counters, sharing_report, visibility
from kvcache.tree_node import TreeNode
from wire.page_hash import tenant_of_key
from wire.request import NOBODY

SHOWN_TOKENS = 8


def node_reports(tree: RadixTree, promotion: Promotion | None = None) -> list[dict[str, Any]]:
    """One mapping per node, parents before children; empty when prefix caching is off.

    `parent` is the index of the parent's mapping, -1 for the root. `held` says by group name what the group
    keeps on the device for the node: tokens of the primary group, window pages, states. `media` are the tiers
    that have all of its pages, by the names that KV events have for them. `tenant` owns a private node, in
    its `generation` (wire/page_hash.py). Where tenants share, a node has its counters, too
    (kvcache/tenancy/usage.py).
    """
    index = {id(tree.root): -1}
    reports: list[dict[str, Any]] = []
    for node in tree.nodes():
        assert node.parent is not None, "the root is not listed"
        tenant, generation = tenant_of_key(node.tenant)
        index[id(node)] = len(reports)
        reports.append(
            {
                "parent": index[id(node.parent)],
                "tokens": node.token_array().tolist(),
                "extra_key": node.namespace.extra_key,
                "cache_salt": node.namespace.cache_salt,
                "is_bigram": node.namespace.is_bigram,
                "tenant": tenant,
                "generation": generation,
                "visibility": visibility(promotion, node),
                "permanently_private": node.permanently_private,
                "held": {component.name: component.report(node).held for component in tree.components},
                "media": [str(medium) for medium in tiers_of(node)],
                "lock": node.lock_ref,
                "hits": node.hit_count,
                **counters(promotion, node),
            }
        )
    return reports


def pretty_print(tree: RadixTree, promotion: Promotion | None = None) -> str:
    """A line of sums, then one line per node, indented by depth: its first tokens, what each group keeps
    there, locks, hits, and the owner of a private node. Where tenants share, there is a line of sums for each
    visibility, and a node has its counters."""
    if not tree.components:
        return "prefix caching is off"
    primary = tree.components[0]
    protected = primary.protected() * tree.page_size
    lines = [f"{primary.evictable() * tree.page_size + protected} tokens cached, {protected} protected"]
    for name, sums in sharing_report(tree, promotion).visibilities.items():
        lines.append(f"{name}: {_named(sums)}")
    for node in tree.nodes():
        tokens = node.token_array()
        shown = " ".join(map(str, tokens[:SHOWN_TOKENS])) + (" ..." if len(tokens) > SHOWN_TOKENS else "")
        held = " ".join(component.report(node).text for component in tree.components)
        line = (
            f"{'  ' * len(node.path())}{node.num_tokens} tokens [{shown}] {held} "
            f"lock={node.lock_ref} hits={node.hit_count}{_whose(promotion, node)}"
        )
        lines.append(f"{line} {_named(counters(promotion, node))}".rstrip())
    return "\n".join(lines)


def _whose(promotion: Promotion | None, node: TreeNode) -> str:
    if not node.tenant:
        return ""
    whose = "one request" if node.tenant.startswith(NOBODY) else tenant_of_key(node.tenant)[0]
    return f" {visibility(promotion, node)}{' for ever' if node.permanently_private else ''} of {whose}"


def _named(values: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
