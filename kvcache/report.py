"""The tree for a program (`node_reports`) and for a person (`pretty_print`)."""

from __future__ import annotations

from typing import Any

from kvcache.radix_tree import RadixTree
from kvcache.snapshot import tiers_of

SHOWN_TOKENS = 8


def node_reports(tree: RadixTree) -> list[dict[str, Any]]:
    """One mapping per node, parents before children; empty when prefix caching is off.

    `parent` is the index of the parent's mapping, -1 for the root. `held` says by group name what the group
    keeps on the device for the node: tokens of the primary group, window pages, states. `media` are the tiers
    that have all of its pages, by the names that KV events have for them.
    """
    index = {id(tree.root): -1}
    reports: list[dict[str, Any]] = []
    for node in tree.nodes():
        assert node.parent is not None, "the root is not listed"
        index[id(node)] = len(reports)
        reports.append(
            {
                "parent": index[id(node.parent)],
                "tokens": node.token_array().tolist(),
                "extra_key": node.namespace.extra_key,
                "cache_salt": node.namespace.cache_salt,
                "is_bigram": node.namespace.is_bigram,
                "tenant": node.tenant,
                "held": {component.name: component.report(node).held for component in tree.components},
                "media": [str(medium) for medium in tiers_of(node)],
                "lock": node.lock_ref,
                "hits": node.hit_count,
            }
        )
    return reports


def pretty_print(tree: RadixTree) -> str:
    """A line of sums, then one line per node, indented by depth: its first tokens, what each group keeps
    there, locks, hits."""
    if not tree.components:
        return "prefix caching is off"
    primary = tree.components[0]
    protected = primary.protected() * tree.page_size
    lines = [f"{primary.evictable() * tree.page_size + protected} tokens cached, {protected} protected"]
    for node in tree.nodes():
        tokens = node.token_array()
        shown = " ".join(map(str, tokens[:SHOWN_TOKENS])) + (" ..." if len(tokens) > SHOWN_TOKENS else "")
        held = " ".join(component.report(node).text for component in tree.components)
        lines.append(
            f"{'  ' * len(node.path())}{node.num_tokens} tokens [{shown}] {held} "
            f"lock={node.lock_ref} hits={node.hit_count}"
        )
    return "\n".join(lines)
