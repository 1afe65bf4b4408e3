"""Window and state groups on the tree, case by case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache.eviction import POLICIES
from kvcache.memory import Memory
from kvcache.radix_key import Namespace
from kvcache.report import pretty_print
from tests.kvcache.driver import Driver
from tests.kvcache.support import Index, cached_tokens, groups, key, locked, memory, radix_cache

A, B, C, D = ([name] * 8 for name in (1, 2, 3, 4))
PAGE = 4


def drive(*kinds: str, window: int = 8, **options: Any) -> Driver:
    """A driver over a full group and those named, at 4 tokens a page."""
    return Driver(memory(PAGE, specs=groups(*kinds, window=window), **options))


def insert(built: Memory, tokens: list[int], window: list[int] | None = None, state: int = 0) -> Any:
    """Insert fresh pages; of the window group those of `window` (one flag a page); the slot `state`."""
    n = len(tokens) // PAGE
    pages = built.allocator.alloc_pages(n)
    assert pages is not None
    offers: dict[str, Any] = {}
    if built.swa is not None:
        own = built.swa.allocator.alloc_pages(n)
        assert own is not None
        offers["window"] = own * np.array(window if window is not None else [1] * n, np.int32)
    if built.states is not None:
        offers["state"] = np.array([state], np.int32)
    return radix_cache(built).insert(key(tokens), pages, offers=offers), offers


def hit(driver: Driver, tokens: list[int]) -> int:
    """Tokens a forward could start behind."""
    return len(driver.memory.cache.match_prefix(key(tokens)).device_indices)


# -- matches -----------------------------------------------------------------------------------------


def test_a_window_match_ends_where_the_window_is_whole() -> None:
    built = memory(PAGE, specs=groups("window", window=8))
    insert(built, A + B + C, window=[0, 1, 1, 0, 1, 1])
    tree = built.cache
    # A query at 24 sees 17.. and needs pages 4 and 5; one at 20 needs page 3; one at 12 pages 1 and 2.
    assert len(tree.match_prefix(key(A + B + C)).device_indices) == 24
    assert len(tree.match_prefix(key((A + B + C)[:23])).device_indices) == 12
    parts = tree.match_parts(key((A + B + C)[:23]))
    assert (parts.part("window") != 0).tolist() == [False, True, True, False, True]
    assert (len(parts.device_indices), parts.branching_len, len(parts.part("state"))) == (20, 20, 0)


def test_a_state_match_ends_at_a_state_and_says_where_the_prompts_part() -> None:
    driver = drive("state")
    driver.run([*A, *B, 9], chunk=8)
    match = driver.memory.cache.match_prefix(key([*A, *B[:4], *C]))
    assert (len(match.device_indices), match.branching_len) == (8, 12)
    assert match.part("state").tolist() != [0]
    parts = driver.memory.cache.match_parts(key([*A, *B[:4]]))
    assert (len(parts.device_indices), parts.part("state").tolist()) == (12, [0]), (
        "there is no state after 12 tokens"
    )


def test_a_combined_match_needs_the_window_and_the_state_at_one_length() -> None:
    built = memory(PAGE, specs=groups("window", "state", window=4))
    assert built.states is not None
    slots = built.states.alloc(2)
    assert slots is not None
    insert(built, A, window=[1, 1], state=slots[0])
    insert(built, A + B, window=[0, 0, 0, 1], state=slots[1])
    cache = built.cache
    assert len(cache.match_prefix(key(A + B + C)).device_indices) == 16
    assert cache.tree.evict("window", 3) == 3, "the pages of A, and then the leaf with all it holds"
    assert len(cache.match_prefix(key(A + B + C)).device_indices) == 0
    assert cached_tokens(built) == 0, "A had a state but no window left"


def test_window_pages_of_an_inner_node_go_one_by_one() -> None:
    built = memory(PAGE, specs=groups("window", window=8))
    insert(built, A + B)
    insert(built, A + B + C)
    tree = built.cache.tree
    assert [tree.evict("window", 1) for _ in range(4)] == [1, 1, 1, 1]
    assert cached_tokens(built) == 24, "all of them were the inner node's"


def test_both_parts_of_a_split_node_can_be_evicted_from() -> None:
    built = memory(PAGE, specs=groups("window", window=8))
    insert(built, A + B)
    assert len(built.cache.match_prefix(key(A + C)).device_indices) == 8
    assert built.cache.tree.evict("window", 4) == 4


def test_both_parts_of_a_node_that_a_match_splits_were_used_by_it() -> None:
    built = memory(PAGE, specs=groups("window", window=8))
    insert(built, A + B, window=[1, 1, 0, 1])
    insert(built, C)
    assert len(built.cache.match_prefix(key(A + B)).device_indices) == 8
    ages = [node.last_access for node in built.cache.tree.nodes() if node.token_array()[0] != C[0]]
    assert len(ages) == 2
    assert ages[0] == ages[1]


# -- repeats, turns and forks --------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(), ("window",), ("state",), ("window", "state")], ids="+".join)
@pytest.mark.parametrize(
    "namespace", [Namespace("m"), Namespace("m", is_bigram=True)], ids=["plain", "bigram"]
)
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_a_full_repeat_hits_all_but_the_last_token_whatever_the_tail(
    kinds: tuple[str, ...], namespace: Namespace, page_size: int
) -> None:
    window = 2 * page_size + 1
    for tail in {0, 1, page_size // 2, page_size - 1}:
        driver = Driver(memory(page_size, pages=16, specs=groups(*kinds, window=window)))
        prompt = np.random.default_rng(tail).integers(0, 9, 3 * page_size + tail + 2).tolist()
        matchable = len(prompt) - (2 if namespace.is_bigram else 1)
        border = matchable // page_size * page_size
        assert driver.run(prompt, namespace=namespace) == 0
        assert driver.run(prompt, namespace=namespace) == border
        assert driver.run(prompt, namespace=namespace) == border, "the repeat split the leaf from its state"
        driver.check()


def test_a_repeat_costs_one_short_forward_more_with_states_than_without() -> None:
    plain, hybrid = drive("window"), drive("state")
    for driver in (plain, hybrid):
        driver.run(A + B + [9])
    assert (plain.forwards, hybrid.forwards) == (1, 2)


@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")], ids="+".join)
def test_the_next_turn_of_a_conversation_hits(kinds: tuple[str, ...]) -> None:
    driver = drive(*kinds)
    answer = [7] * 20
    driver.run([*A, *B, 9], steps=len(answer))
    # States are kept every 8 tokens; the window of an earlier one is gone when the request ends.
    reached = {("window",): 36, ("state",): 32, ("window", "state"): 16}[kinds]
    assert driver.run([*A, *B, 9, *answer, *C]) == reached
    driver.check()


def test_a_fork_saves_a_state_where_the_prompts_part() -> None:
    driver = drive("state")
    driver.run(A + B + C)
    assert driver.run(A + B + D) == 0, "nobody knew that prompts would part here"
    assert hit(driver, A + B) == 16
    assert driver.run(A + B + [5] * 8) == 16


def test_cut_points_are_ascending_lengths_beyond_what_is_cached() -> None:
    driver = drive("window", "state")
    driver.run([*A, *B, 9])
    req = driver.admit([*A, *B[:4], *C, 9])
    assert req.kv_committed_len == 0
    assert driver.memory.cache.cut_points(req, 21) == (12, 20)
    for _ in driver.prefill(req):
        pass
    assert driver.memory.cache.cut_points(req, 21) == ()
    assert drive("window").memory.cache.cut_points(req, 21) == ()


# -- tombstones ----------------------------------------------------------------------------------------


def test_a_reinserted_prefix_revives_tombstones_and_keeps_the_rest() -> None:
    driver = drive("window", "state", window=4)
    built = driver.memory
    driver.run([*A, *B, *C, 9], chunk=8)
    assert built.cache.tree.evict("state", 2) == 2
    assert built.cache.tree.evict("window", 2) == 2
    assert hit(driver, A + B) == 0
    driver.run([*A, *D, 9], chunk=8)  # gives the states and pages of A again
    assert hit(driver, A + B) == 8
    driver.check()
    cached = cached_tokens(built)
    driver.run([*A, *B, 9], chunk=8)
    assert cached_tokens(built) == cached, "a revival is no new node"
    assert hit(driver, A + B + [9]) == 16
    driver.check()


def test_what_the_tree_has_is_not_taken_again() -> None:
    built = memory(PAGE, specs=groups("window", "state"))
    assert built.swa is not None
    assert built.states is not None
    first, second = built.states.alloc(1), built.states.alloc(1)
    assert first is not None
    assert second is not None
    (result, offers) = insert(built, A, state=first[0])
    assert (result.match.part("window") == offers["window"]).all()
    (again, _) = insert(built, A, state=second[0])
    assert again.prefix_len == 8
    assert again.match.part("window").tolist() == offers["window"].tolist()
    assert again.match.part("state").tolist() == [first[0]]


def test_no_leaf_is_made_where_nothing_could_continue() -> None:
    built = memory(PAGE, specs=groups("window", "state"))
    result, _ = insert(built, A)
    assert len(result.match.device_indices) == 0, "no state is offered"
    assert cached_tokens(built) == 0
    window = memory(PAGE, specs=groups("window"))
    result, _ = insert(window, A + B, window=[1, 1, 1, 0])
    assert len(result.match.device_indices) == 12, "cached as far as the window's pages go"


def test_ancestors_without_a_state_go_with_the_last_leaf() -> None:
    driver = drive("state")
    driver.run([*A, *B, 9], chunk=8)
    index = Index()
    index.read(*driver.memory.take_events())
    assert driver.memory.cache.tree.evict("state", 1) == 1
    assert driver.memory.take_events() == ([], []), "a dropped state is silent"
    assert len(index.blocks) == 4
    assert driver.memory.cache.tree.evict("full", 1) == 4, "the leaf, and then A, which had no state left"
    index.read(*driver.memory.take_events())
    assert not index.blocks
    driver.check()


def test_a_leaf_that_loses_its_window_under_a_lock_goes_with_the_last_lock() -> None:
    driver = drive("window", window=4)
    built = driver.memory
    req = driver.admit([*A, 9])
    for _ in driver.prefill(req):
        pass
    for _ in driver.decode(req, 8):
        pass
    assert req.cache_protected_len == 8
    assert built.cache.tree.evict("window", 9) == 2, "decode has left both pages of the prompt"
    built.take_events()
    assert cached_tokens(built) == 8, "its full pages are locked"
    driver.finish(req, is_insert=False)
    assert cached_tokens(built) == 0
    assert [event.block_hashes for event in built.take_events().public] != []
    driver.check()


# -- locks ---------------------------------------------------------------------------------------------


def test_window_locks_move_page_by_page_while_a_request_decodes() -> None:
    driver = drive("window", window=8)
    cache = driver.memory.cache
    driver.run([*A, *B, *C, 9])
    req = driver.admit([*A, *B, *C, 9])
    for _ in driver.prefill(req):
        pass
    evictable = []
    for length in driver.decode(req, 12):
        if length % PAGE == 2:  # the step after a page border gave a page up
            evictable.append(cache.tree.evictable("window"))
    assert evictable == [4, 5, 6], "one page more at every border"
    driver.check()


def test_a_state_lock_holds_one_node_and_a_full_lock_the_path() -> None:
    driver = drive("state")
    driver.run([*A, *B, *C, 9], chunk=8)
    cache = driver.memory.cache
    with locked(driver.memory, A + B):
        assert cache.tree.evict("state", 9) == 2, "A's state alone, C with its leaf"
        assert cached_tokens(driver.memory) == 16
        assert hit(driver, A + B) == 16
    assert cache.tree.evict("state", 9) == 1
    assert cached_tokens(driver.memory) == 0


def test_a_request_that_cannot_get_another_slot_gives_nothing_to_the_tree() -> None:
    driver = drive("state", state_slots=4)
    one, two = driver.admit([*A, 9]), driver.admit([*B, 9])
    for _ in driver.prefill(one):
        pass
    assert cached_tokens(driver.memory) == 0
    driver.finish(two, is_insert=False)
    driver.finish(one)
    assert hit(driver, A) == 8, "a request that ends needs no other slot"
    driver.check()


# -- eviction ------------------------------------------------------------------------------------------


def test_of_a_long_leaf_only_what_no_window_needs_goes_first() -> None:
    driver = drive("window", window=8)
    req = driver.admit([*A, *B, *C, *D])
    for _ in driver.prefill(req, chunk=8):
        pass
    driver.finish(req)
    cache = driver.memory.cache
    held = cache.tree.evictable("window")
    assert cache.tree.evict("window", held - 2) == held - 2
    assert hit(driver, A + B + C + D) == 32, "the last window is whole"
    assert cache.tree.evict("window", 1) == 2, "now the leaf goes, and what lies above it"
    assert cached_tokens(driver.memory) == 0
    driver.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("group", ["window", "state"])
def test_every_policy_orders_every_group(policy: str, group: str) -> None:
    driver = drive(group, window=4, eviction_policy=policy)
    built = driver.memory
    cache = built.cache
    uses = {1: (3, 1), 2: (2, 9), 3: (1, 0), 4: (0, 0)}  # name: hits, priority
    states = built.states.alloc(4) if built.states else np.zeros(4, np.int32)
    assert states is not None
    slots = iter(states.tolist())
    for name in uses:
        insert(built, [name] * 4, state=next(slots))
    for name, (hits, priority) in uses.items():
        for _ in range(hits):
            radix_cache(built).insert(key([name] * 4), np.zeros(1, np.int32), priority=priority)
    gone = []
    left = set(uses)
    while left:
        assert cache.tree.evict(group, 1) == 1
        now = {int(node.token_array()[0]) for node in cache.tree.nodes()}
        gone += sorted(left - now)
        left = now
    expected = {
        "lru": [4, 1, 2, 3],
        "mru": [3, 2, 1, 4],
        "lfu": [4, 3, 2, 1],
        "fifo": [1, 2, 3, 4],
        "filo": [4, 3, 2, 1],
        "priority": [4, 3, 1, 2],
        "slru": [4, 3, 1, 2],
    }
    assert gone == expected[policy]
    assert list(cache.tree.check(lambda *_: iter(()))) == [None], "one slice, and no complaint"


def test_pretty_print_says_what_each_group_keeps() -> None:
    driver = drive("window", "state", window=4)
    driver.run([*A, *B, 9], chunk=8)
    req = driver.admit([*A, *B, 9])
    text = pretty_print(driver.memory.cache.tree).splitlines()
    assert text[0] == "16 tokens cached, 16 protected"
    assert text[1].startswith("  8 tokens [1 1 1 1 1 1 1 1] full=2 window=")
    assert "window=2 (1 locked) state=" in text[2]
    assert text[2].endswith("(locked 1x) lock=1 hits=2")
    driver.finish(req, is_insert=False)
