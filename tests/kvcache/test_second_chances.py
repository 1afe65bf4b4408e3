"""What another worker asked for stays a few times when it would be evicted."""

from __future__ import annotations

import pytest

from kvcache.eviction import POLICIES
from kvcache.memory import Memory
from kvcache.second_chances import give_chances
from kvcache.tree_node import ALL_CHANCES, ONE_CHANCE
from tests.kvcache.support import key, matched, memory, put

LENT, LONGER, OTHER = list(range(32)), list(range(40)), list(range(100, 132))
TIMES = ALL_CHANCES // ONE_CHANCE


def lend(built: Memory, tokens: list[int]) -> None:
    node = built.cache.match_prefix(key(tokens)).last_device_node
    assert node is not None
    give_chances(node)


def evicts_other(built: Memory) -> bool:
    """Put in something newer, and evict as much. Whether that went, and not the older that was lent."""
    put(built, OTHER)
    built.cache.match_prefix(key([7, 7, 7, 7]))  # time passes
    built.cache.tree.evict("full", 8)
    return matched(built, OTHER) == 0


def test_what_was_lent_stays_a_few_times_and_goes_in_the_end() -> None:
    with memory(pages=32) as built:
        put(built, LENT)
        lend(built, LENT)
        assert [evicts_other(built) for _ in range(TIMES)] == [True] * TIMES
        assert not evicts_other(built)
        assert matched(built, LENT) == 0


def test_all_of_a_path_stays_at_once() -> None:
    """It does not go node by node, each after as many times."""
    with memory(pages=32) as built:
        put(built, LENT[:16])
        put(built, LENT)
        lend(built, LENT)
        for _ in range(TIMES):
            assert evicts_other(built)
        put(built, OTHER)
        built.cache.match_prefix(key([7, 7, 7, 7]))
        built.cache.tree.evict("full", 8)
        assert (matched(built, LENT), matched(built, OTHER)) == (0, 32)


def test_what_is_below_it_has_no_second_chance() -> None:
    with memory(pages=32) as built:
        put(built, LONGER)
        lend(built, LENT)
        put(built, OTHER)
        built.cache.tree.evict("full", 2)
        assert (matched(built, LONGER), matched(built, OTHER)) == (32, 32)


def test_a_copy_has_no_second_chance() -> None:
    with memory(pages=32) as built:
        put(built, LENT, is_copy=True)
        lend(built, LENT)
        put(built, OTHER)
        built.cache.tree.evict("full", 8)
        assert (matched(built, LENT), matched(built, OTHER)) == (0, 32)


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_can_be_evicted_under_each_policy(policy: str) -> None:
    with memory(pages=32, eviction_policy=policy) as built:
        for tokens in (LENT, LONGER, OTHER):
            put(built, tokens)
            lend(built, tokens)
        assert built.cache.tree.evict("full", 32) == 18
        assert not list(built.cache.tree.nodes())
