"""Window and state groups on the tree, case by case."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from kvcache.config import MIN_STATE_SLOTS, CacheConfig
from kvcache.eviction import POLICIES
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec, pages_in
from kvcache.memory import Memory, build_memory
from kvcache.pool import MambaPool, MLAKVCache
from kvcache.radix_key import Namespace
from kvcache.request import MOVING, StateHold
from tests.kvcache.driver import Driver
from tests.kvcache.support import SPEC, Index, groups, key, memory, tree_of
from wire.errors import ConfigError

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
        offers["state"] = state
    return tree_of(built).insert(key(tokens), pages, offers=offers), offers


def hit(driver: Driver, tokens: list[int]) -> int:
    """Tokens a forward could start behind."""
    return len(driver.memory.cache.match_prefix(key(tokens)).device_indices)


# -- matches -----------------------------------------------------------------------------------------


def test_a_window_match_ends_where_the_window_is_whole() -> None:
    built = memory(PAGE, specs=groups("window", window=8))
    insert(built, A + B + C, window=[0, 1, 1, 0, 1, 1])
    tree = tree_of(built)
    # A query at 24 sees 17.. and needs pages 4 and 5; one at 20 needs page 3; one at 12 pages 1 and 2.
    assert len(tree.match_prefix(key(A + B + C)).pages) == 6
    assert len(tree.match_prefix(key((A + B + C)[:23])).pages) == 3
    parts = tree.match_parts(key((A + B + C)[:23]))
    assert (parts.window_pages != 0).tolist() == [False, True, True, False, True]
    assert (len(parts.pages), parts.branching_len, parts.state_slot) == (5, 20, 0)


def test_a_state_match_ends_at_a_state_and_says_where_the_prompts_part() -> None:
    driver = drive("state")
    driver.run([*A, *B, 9], chunk=8)
    match = driver.memory.cache.match_prefix(key([*A, *B[:4], *C]))
    assert (len(match.device_indices), match.branching_len) == (8, 12)
    assert match.state_slot
    assert driver.memory.cache.match_parts(key(A + B)).state_slot == 0


def test_a_combined_match_needs_the_window_and_the_state_at_one_length() -> None:
    built = memory(PAGE, specs=groups("window", "state", window=4))
    assert built.states is not None
    slots = built.states.alloc(2)
    assert slots is not None
    insert(built, A, window=[1, 1], state=slots[0])
    insert(built, A + B, window=[0, 0, 0, 1], state=slots[1])
    tree = tree_of(built)
    assert len(tree.match_prefix(key(A + B + C)).pages) == 4
    assert tree.evict_window(3) == 3, "the pages of A, and then the leaf with all it holds"
    assert len(tree.match_prefix(key(A + B + C)).pages) == 0
    assert tree.total_size() == 0, "A had a state but no window left"


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
    assert built.cache.evict_mamba(2) == 2
    assert built.cache.evict_window(2) == 2
    assert hit(driver, A + B) == 0
    driver.run([*A, *D, 9], chunk=8)  # gives the states and pages of A again
    assert hit(driver, A + B) == 8
    driver.check()
    cached = built.cache.total_size()
    driver.run([*A, *B, 9], chunk=8)
    assert built.cache.total_size() == cached, "a revival is no new node"
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
    assert (result.match.window_pages == offers["window"]).all()
    (again, _) = insert(built, A, state=second[0])
    assert again.prefix_len == 8
    assert again.match.window_pages.tolist() == offers["window"].tolist()
    assert again.match.state_slot == first[0]


def test_no_leaf_is_made_where_nothing_could_continue() -> None:
    built = memory(PAGE, specs=groups("window", "state"))
    result, _ = insert(built, A)
    assert len(result.match.pages) == 0, "no state is offered"
    assert built.cache.total_size() == 0
    window = memory(PAGE, specs=groups("window"))
    result, _ = insert(window, A + B, window=[1, 1, 1, 0])
    assert len(result.match.pages) == 3, "cached as far as the window's pages go"


def test_ancestors_without_a_state_go_with_the_last_leaf() -> None:
    driver = drive("state")
    driver.run([*A, *B, 9], chunk=8)
    index = Index()
    index.read(driver.memory.cache.take_events())
    assert driver.memory.cache.evict_mamba(1) == 1
    assert driver.memory.cache.take_events() == [], "a dropped state is silent"
    assert len(index.blocks) == 4
    assert driver.memory.cache.evict(1) == 16, "the leaf, and then A, which had no state left"
    index.read(driver.memory.cache.take_events())
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
    assert built.cache.evict_window(9) == 2, "decode has left both pages of the prompt"
    built.cache.take_events()
    assert built.cache.total_size() == 8, "its full pages are locked"
    driver.finish(req, is_insert=False)
    assert built.cache.total_size() == 0
    assert [event.block_hashes for event in built.cache.take_events()] != []
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
            evictable.append(cache.evictable_window_pages())
    assert evictable == [4, 5, 6], "one page more at every border"
    driver.check()


def test_a_state_lock_holds_one_node_and_a_full_lock_the_path() -> None:
    driver = drive("state")
    driver.run([*A, *B, *C, 9], chunk=8)
    cache = driver.memory.cache
    node = cache.match_prefix(key(A + B)).last_device_node
    with cache.locked(node):
        assert cache.evict_mamba(9) == 2, "A's state alone, C with its leaf"
        assert cache.total_size() == 16
        assert hit(driver, A + B) == 16
    assert cache.evict_mamba(9) == 1
    assert cache.total_size() == 0


def test_a_request_that_cannot_get_another_slot_gives_nothing_to_the_tree() -> None:
    driver = drive("state", state_slots=4)
    one, two = driver.admit([*A, 9]), driver.admit([*B, 9])
    for _ in driver.prefill(one):
        pass
    assert driver.memory.cache.total_size() == 0
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
    held = cache.evictable_window_pages()
    assert cache.evict_window(held - 2) == held - 2
    assert hit(driver, A + B + C + D) == 32, "the last window is whole"
    assert cache.evict_window(1) == 2, "now the leaf goes, and what lies above it"
    assert cache.total_size() == 0
    driver.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("group", ["window", "state"])
def test_every_policy_orders_every_group(policy: str, group: str) -> None:
    driver = drive(group, window=4, eviction_policy=policy)
    built = driver.memory
    cache = built.cache
    uses = {1: (3, 1), 2: (2, 9), 3: (1, 0), 4: (0, 0)}  # name: hits, priority
    slots = iter(built.states.alloc(4) or []) if built.states else iter([0] * 4)
    for name in uses:
        insert(built, [name] * 4, state=next(slots))
    for name, (hits, priority) in uses.items():
        for _ in range(hits):
            tree_of(built).insert(key([name] * 4), np.zeros(1, np.int32), priority=priority)
    gone = []
    left = set(uses)
    evict = cache.evict_window if group == "window" else cache.evict_mamba
    while left:
        assert evict(1) == 1
        now = {int(node.token_array()[0]) for node in tree_of(built).nodes()}
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
    built.cache.check()


# -- frees and quarantine ------------------------------------------------------------------------------


def test_pages_of_every_group_wait_in_quarantine() -> None:
    driver = drive("window", "state")
    built = driver.memory
    assert built.swa is not None
    assert built.states is not None
    pages, own, slots = (
        built.allocator.alloc_pages(2),
        built.swa.allocator.alloc_pages(3),
        built.states.alloc(1),
    )
    assert pages is not None
    assert own is not None
    assert slots is not None
    built.quarantine({"full": pages, "window": own, "state": np.array(slots)}, "room")
    report = built.check_memory()
    assert report.quarantined_pages == 2
    assert {name: books.quarantined for name, books in report.groups.items()} == {"window": 3, "state": 1}
    assert built.release_quarantine("room") == 6
    assert all(books.quarantined == 0 for books in built.check_memory().groups.values())


def test_a_free_group_spans_all_groups_but_what_is_evicted_is_free_at_once() -> None:
    driver = drive("window", "state")
    built = driver.memory
    driver.run(A + B, chunk=8)
    assert built.states is not None
    slots = built.states.alloc(1)
    assert slots is not None
    before = built.states.allocator.available_pages()
    built.free_group_begin()
    built.states.free(slots)
    assert built.cache.evict_mamba(1) == 1
    assert built.states.allocator.available_pages() == before + 1
    taken = built.free_group_take()
    assert {name: pages.tolist() for name, pages in taken.items()} == {"state": slots}
    built.free(taken)
    driver.check()


def test_a_lost_window_page_or_state_is_named() -> None:
    built = memory(PAGE, specs=groups("window", "state"))
    assert built.swa is not None
    assert built.states is not None
    own, slots = built.swa.allocator.alloc_pages(1), built.states.alloc(1)
    with pytest.raises(AssertionError, match="1 window pages lost"):
        built.check_memory()
    with pytest.raises(AssertionError, match="1 state pages lost"):
        built.check_memory({"window": own})
    assert built.check_memory({"window": own, "state": slots or []}).groups["state"].held == 1


@pytest.mark.parametrize("kinds", [("window",), ("state",), ("window", "state")], ids="+".join)
def test_without_prefix_caching_a_request_keeps_its_window_and_its_slots_alone(
    kinds: tuple[str, ...],
) -> None:
    driver = drive(*kinds, prefix_cache="none")
    built = driver.memory
    req = driver.admit([*A, *B, *C])
    for _ in driver.prefill(req, chunk=8):
        pass
    for _ in driver.decode(req, 9):
        report = driver.check()
        if built.swa is not None:
            assert report.groups["window"].held <= 3
    assert report.held_pages == 9
    assert driver.admit(A + B).kv_committed_len == 0
    for live in tuple(driver.live):
        driver.finish(live)
    assert all(books.free == books.total for books in driver.check().groups.values())


# -- a state's travels ---------------------------------------------------------------------------------


def test_a_cached_state_is_read_once_and_never_written() -> None:
    hold = StateHold([1, 2], live=9, live_len=8)
    assert hold.decode(8) == (9, 1)
    assert hold.decode(9) == (1, 1)
    assert hold.decode(10) == (1, 1)
    assert (hold.live, hold.live_len, hold.tracked) == (1, MOVING, 0)


def test_a_checkpoint_freezes_one_slot_and_the_other_goes_on() -> None:
    hold = StateHold([1, 2])
    assert hold.prefill(8) == (0, 1)
    assert hold.states() == [(8, 1)]
    assert hold.decode(8, checkpoint=True) == (1, 2)
    assert hold.states() == [(8, 1)]
    for length in range(9, 16):
        assert hold.decode(length) == (2, 2)
    assert hold.decode(16, checkpoint=True) == (2, 1)
    assert hold.states() == [(16, 2)]


def test_chunks_alternate_and_the_state_before_the_last_is_kept() -> None:
    for first, second in permutations((1, 2)):
        hold = StateHold([first, second])
        assert hold.prefill(4) == (0, first)
        assert hold.prefill(8) == (first, second)
        assert hold.states() == [(8, second), (4, first)]
        hold.give(first)
        assert hold.tracked == 0, "what was given may come back with another state in it"
        hold.private.append(3)
        assert hold.prefill(12) == (second, 3)
        assert hold.states() == [(12, 3), (8, second)]


def test_a_checkpoint_survives_picking_up_a_state_of_the_tree() -> None:
    hold = StateHold([1, 2], live=2, live_len=8, tracked=1, tracked_len=4)
    hold.give(2)
    hold.private.append(3)
    assert hold.decode(8) == (2, 3)
    assert hold.states() == [(4, 1)]


# -- building ------------------------------------------------------------------------------------------


def config(**options: Any) -> CacheConfig:
    return CacheConfig(**{"total_tokens": 640, "max_context_len": 320, "max_running_requests": 4, **options})


def test_pools_are_sized_by_group() -> None:
    latent = LatentGroupSpec((0,), kv_lora_rank=8, rope_dim=4, dtype=SPEC.dtype)
    built = build_memory(config(shared=True), [latent, *groups("window", "state", window=32)[1:]])
    assert isinstance(built.kv_cache, MLAKVCache)
    assert isinstance(built.kv_caches["state"], MambaPool)
    assert {name: a.num_pages for name, a in built.allocators.items()} == {
        "latent": 40, "window": 32, "state": 16,
    }  # fmt: skip
    assert all(pool.num_pages == built.allocators[name].num_pages for name, pool in built.kv_caches.items())
    assert len({built.shared_fd(name) for name in built.allocators} - {None}) == 3
    built.close()


def test_a_full_group_without_layers_has_no_bytes_and_no_descriptor() -> None:
    specs: list[GroupSpec] = [KVGroupSpec((), 2, 4, SPEC.dtype), *groups("window")[1:]]
    built = build_memory(config(shared=True), specs)
    assert built.shared_fd("full") is None
    assert built.shared_fd("window") == built.kv_caches["window"].fd
    assert built.kv_cache.bytes.numel() == 0
    assert built.allocator.available_pages() == 40
    built.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window_tokens": 16}, "window_tokens"),
        ({"state_slots": MIN_STATE_SLOTS - 1}, "state_slots"),
        ({"mamba_track_interval": 24}, "mamba_track_interval"),
        ({"swa_full_tokens_ratio": 0.0}, "swa_full_tokens_ratio"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_memory(config(**change), groups("window", "state"))
    assert caught.value.key == named


def test_defaults_of_sizes() -> None:
    assert config().window_pages(32) == 32, "0.8 of 40"
    assert config(swa_full_tokens_ratio=0.1).window_pages(32) == 20, "a prompt in one chunk"
    assert config(swa_full_tokens_ratio=0.1, max_chunk_tokens=64).window_pages(32) == 8
    assert config(window_tokens=1 << 20).window_pages(32) == 40
    assert (config().num_state_slots, config(pre_alloc_size=8).num_state_slots) == (16, 32)
    assert config(mamba_track_interval=24).num_pages == 40, "no state group, no interval"


def test_capacity_counts_every_group() -> None:
    specs = groups("window", "state")
    full, window, state = (spec.page_bytes(16) for spec in specs)
    room = 11 * full + 6 * window + 4 * state
    assert pages_in(room, specs, 16, window_ratio=0.5, state_slots=3) == 10
    assert pages_in(room - 1, specs, 16, window_ratio=0.5, state_slots=3) == 9


def test_pretty_print_says_what_each_group_keeps() -> None:
    driver = drive("window", "state", window=4)
    driver.run([*A, *B, 9], chunk=8)
    req = driver.admit([*A, *B, 9])
    text = driver.memory.cache.pretty_print().splitlines()
    assert text[0] == "16 tokens cached, 16 protected"
    assert text[1].startswith("  8 tokens [1 1 1 1 1 1 1 1] full=2 window=")
    assert "window=2 (1 locked) state=" in text[2]
    assert text[2].endswith("(locked 1x) lock=1 hits=2")
    driver.finish(req, is_insert=False)
