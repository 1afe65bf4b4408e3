"""What counts as evictable can be evicted, whatever the policy thinks of it: schedulers rely on the count."""

from __future__ import annotations

import random

import pytest

from kvcache.eviction import POLICIES
from tests.kvcache.support import memory, put

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


@every_policy
def test_a_leaf_that_grows_from_an_older_one_goes_too(policy: str) -> None:
    """The parent is used often and matters much; its new leaf is neither."""
    built = memory(eviction_policy=policy)
    for _ in range(3):
        put(built, range(8), priority=5)
    put(built, range(16), chunked=True)
    put(built, range(24), chunked=True, priority=-3)
    assert built.cache.tree.evictable("full") == 6
    built.cache.tree.evict("full", 6)
    assert built.cache.tree.evictable("full") == 0


@every_policy
def test_a_request_of_negative_priority_can_be_evicted(policy: str) -> None:
    built = memory(eviction_policy=policy)
    put(built, range(8), priority=-1)
    put(built, [*range(4), *range(50, 58)], priority=-7)
    assert built.cache.tree.evictable("full") > 0
    built.cache.tree.evict("full", 1000)
    assert built.cache.tree.evictable("full") == 0


@every_policy
def test_everything_goes_however_the_tree_grew(policy: str) -> None:
    rng = random.Random(policy)
    for _ in range(40):
        built = memory(eviction_policy=policy, pages=256)
        for _ in range(12):
            beginning = range(rng.randrange(3) * 100, 1000)
            tokens = [*beginning[: rng.randrange(4, 30)], *range(rng.randrange(2), 900)][
                : rng.randrange(4, 60)
            ]
            put(built, tokens, chunked=rng.random() < 0.5, priority=rng.randrange(-2, 3))
            if rng.random() < 0.4:
                before = built.cache.tree.evictable("full")
                wanted = rng.randrange(1, 6)
                assert built.cache.tree.evict("full", wanted) >= min(wanted, before)
        built.cache.tree.evict("full", 10_000)
        assert built.cache.tree.evictable("full") == 0
        built.check_memory()
