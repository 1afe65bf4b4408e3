"""How many queries of a chunk attention in plain torch computes together.

Their scores, float32 [query heads, queries, keys], are in memory at the same time. The longer the context is,
the fewer queries these may be: 256 queries of 64 heads have 8.6 GB of scores at 131,072 keys.
"""

from __future__ import annotations

SCORES_AT_ONCE = 1 << 26
"""Scores that are in memory together: 256 MiB, and a small multiple of that for what is made of them."""


def query_blocks(queries: int, scores: int) -> list[slice]:
    """`queries` in blocks; `scores` is what one of them has. A block has at least one query."""
    step = max(1, SCORES_AT_ONCE // scores)
    return [slice(first, min(first + step, queries)) for first in range(0, queries, step)]
