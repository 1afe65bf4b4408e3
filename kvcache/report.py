"""The tree for a program: every node with all its tokens, what each component keeps there, locks and hits.

`RadixCache.pretty_print` says the same to a person, with the tokens cut short.
"""

from __future__ import annotations

from typing import Any

from kvcache.base_prefix_cache import BasePrefixCache
from kvcache.radix_cache import RadixCache


def node_reports(cache: BasePrefixCache) -> list[dict[str, Any]]:
    """One mapping per node, parents before children; empty when prefix caching is off.

    `parent` is the index of the parent's mapping, -1 for the root. `held` says by component what it keeps on
    the node: tokens, window pages, states.
    """
    if not isinstance(cache, RadixCache):
        return []
    index = {id(cache.root): -1}
    reports: list[dict[str, Any]] = []
    for node in cache.nodes():
        assert node.parent is not None, "the root is not listed"
        index[id(node)] = len(reports)
        reports.append(
            {
                "parent": index[id(node.parent)],
                "tokens": node.token_array().tolist(),
                "extra_key": node.namespace.extra_key,
                "cache_salt": node.namespace.cache_salt,
                "is_bigram": node.namespace.is_bigram,
                "held": cache.held(node),
                "lock": node.lock_ref,
                "hits": node.hit_count,
            }
        )
    return reports
