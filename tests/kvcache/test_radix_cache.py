"""The tree, case by case: isolation, splits, locks, policies, events, and the seam for other components."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from kvcache.components.base import TreeComponent
from kvcache.config import CacheConfig, KVEventsConfig
from kvcache.events import EventRecorder
from kvcache.eviction import POLICIES, Evictor
from kvcache.radix_cache import RadixCache
from kvcache.radix_key import Namespace
from kvcache.request import CachedRequest
from kvcache.tree_node import TreeNode
from tests.kvcache.support import (
    NAMESPACE,
    Index,
    key,
    matched,
    memory,
    put,
    reference_hashes,
    request,
    tree_of,
)

A, B, C = [1] * 4, [2] * 4, [3] * 4


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model", extra_key="x"),
        Namespace("model", cache_salt="x"),
        Namespace("model", is_bigram=True),
        Namespace("model2"),
    ],
)
def test_namespaces_share_nothing(other: Namespace) -> None:
    built = memory()
    put(built, A + B)
    assert matched(built, A + B + [9], other) == 0
    pages = put(built, A + B + [9], other)
    assert matched(built, A + B + [9], other) == 8
    assert not set(pages) & set(put(built, A + B))


def test_a_match_is_floored_to_pages_and_splits_exactly_there() -> None:
    built = memory()
    pages = put(built, A + B + C)
    result = built.cache.match_prefix(key([*A, *B[:3], 9]))
    assert result.pages.tolist() == pages[:1]
    assert result.device_indices.tolist() == [pages[0] * 4 + i for i in range(4)]
    assert [node.num_tokens for node in tree_of(built).nodes()] == [4, 8]
    assert matched(built, A + B + C) == 12
    assert built.cache.total_size() == 12


def test_a_bigram_page_needs_one_token_more_and_reports_pairs() -> None:
    built = memory()
    bigram = Namespace("model", is_bigram=True)
    put(built, range(9), bigram)
    assert matched(built, range(8), bigram) == 4
    assert matched(built, [*range(8), 99], bigram) == 4
    assert matched(built, range(9), bigram) == 8
    (event,) = built.cache.take_events()
    assert event.token_ids == [[i, i + 1] for i in range(8)]


def test_a_locked_path_survives_eviction_and_a_split_inherits_the_lock() -> None:
    built = memory()
    put(built, A + B)
    node = built.cache.match_prefix(key(A + B)).last_device_node
    with built.cache.locked(node):
        put(built, A + C)
        assert (built.cache.protected_size(), built.cache.evictable_size()) == (8, 4)
        assert built.cache.evict(100) == 4
        built.check_memory()
    assert built.cache.evict(100) == 8
    assert built.cache.total_size() == 0
    built.check_memory()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [2, 3, 4, 1]),
        ("mru", [1, 4, 3, 2]),
        ("lfu", [4, 3, 2, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("filo", [4, 3, 2, 1]),
        ("priority", [3, 4, 1, 2]),
        ("slru", [3, 4, 2, 1]),
    ],
)
def test_policies(policy: str, expected: list[int]) -> None:
    built = memory(eviction_policy=policy)
    for name, hits, priority in ((1, 4, 1), (2, 3, 9), (3, 1, 0), (4, 0, 0)):
        for _ in range(hits + 1):
            put(built, [name] * 4, priority=priority)
    matched(built, [1] * 4)
    left, gone = {1, 2, 3, 4}, []
    while left:
        assert built.cache.evict(1) == 4
        held = {int(node.token_array()[0]) for node in tree_of(built).nodes()}
        gone += sorted(left - held)
        left = held
    assert gone == expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(deadline=None, max_examples=40)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=20),
    data=st.data(),
)
def test_whatever_grew_and_was_used_the_first_in_policy_order_goes(
    policy: str, prompts: list[list[int]], data: st.DataObject
) -> None:
    built = memory(page_size=1, pages=256, eviction_policy=policy)
    tree, order = tree_of(built), POLICIES[policy]
    for tokens in prompts:
        put(built, tokens, priority=data.draw(st.integers(-1, 2)))
        matched(built, data.draw(st.sampled_from(prompts)))
        if data.draw(st.integers(0, 5)) == 0:
            tree.evict(1)
    while tree.total_size():
        leaves = [node for node in tree.nodes() if not node.children]
        tree.evict(1)
        held = {id(node) for node in tree.nodes()}
        (gone,) = [node for node in leaves if id(node) not in held]
        assert order(gone) == min(map(order, leaves))


def test_an_unknown_policy_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        memory(eviction_policy="random")
    assert caught.value.key == "eviction_policy"
    assert all(name in caught.value.remedy for name in POLICIES)


def test_lookup_of_many_offers_keeps_the_heap_small() -> None:
    built = memory()
    put(built, A)
    for _ in range(1000):
        with built.cache.locked(built.cache.match_prefix(key(A)).last_device_node):
            pass
    assert len(tree_of(built)._full.evictor._heap) == 1


def test_events_are_chained_by_the_written_definition_and_survive_splits() -> None:
    built = memory()
    salted = Namespace("model", extra_key="lora", cache_salt="s")
    put(built, A + B + C, salted)
    put(built, A + C, salted)
    first, second = built.cache.take_events()
    assert first.block_hashes == reference_hashes(salted, A + B + C, 4)
    assert first.parent_block_hash is None
    assert (first.token_ids, first.block_size, first.medium) == (A + B + C, 4, "GPU")
    assert (first.extra_keys, first.cache_salt) == ([["lora"]] * 3, "s")
    assert second.block_hashes == reference_hashes(salted, A + C, 4)[1:]
    assert second.parent_block_hash == first.block_hashes[0]
    built.cache.evict(100)
    removed = [name for event in built.cache.take_events() for name in event.block_hashes]
    assert sorted(removed) == sorted(first.block_hashes + second.block_hashes)


def test_hashes_are_computed_only_when_events_are_on() -> None:
    built = memory()
    silent = RadixCache(built.req_to_token_pool, built.allocator)
    pages = built.allocator.alloc_pages(1)
    assert pages is not None
    silent.insert(key(A), pages)
    assert [node.digests for node in silent.nodes()] == [None]
    assert silent.take_events() == []


def test_an_overflow_becomes_a_clear_and_a_snapshot() -> None:
    built = memory()
    recorder = EventRecorder(4, max_events=3)
    tree = RadixCache(built.req_to_token_pool, built.allocator, recorder=recorder)
    index = Index()
    for name in range(6):
        pages = built.allocator.alloc_pages(2)
        assert pages is not None
        tree.insert(key([name] * 8), pages)
        if name == 0:
            index.read(tree.take_events())
    tree.evict(8)
    assert recorder.overflows == 1
    index.read(tree.take_events())
    expected = [name for i in range(1, 6) for name in reference_hashes(NAMESPACE, [i] * 8, 4)]
    assert sorted(index.blocks) == sorted(expected)
    tree.evict(8)
    index.read(tree.take_events())
    assert len(index.blocks) == 8


def test_reset_frees_all_and_clears_consumers() -> None:
    built = memory()
    put(built, A + B)
    built.cache.reset()
    assert built.allocator.available_pages() == 64
    assert built.cache.total_size() == 0
    index = Index()
    index.read(built.cache.take_events())
    assert not index.blocks
    put(built, A)
    assert matched(built, A) == 4
    built.check_memory()


class Marked(TreeComponent):
    """A toy group: a match ends at a node that carries a mark, as a state group's would."""

    name = "marked"

    def __init__(self) -> None:
        self.evictor = Evictor("lru", 8)
        self.locks: list[str] = []
        self.freed: list[object] = []

    def valid_lengths(self, path: Sequence[TreeNode], pages: int) -> np.ndarray:
        valid = np.arange(pages + 1) == 0
        for end, node in zip(np.cumsum([node.num_pages for node in path]), path, strict=True):
            valid[end] = bool(node.parts[self.name])
        return valid

    def insert(self, node: TreeNode, start: int, offer: object) -> None:
        node.parts[self.name] = f"state after {node.num_tokens}"

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        upper.parts[self.name] = None

    def lock(self, node: TreeNode) -> None:
        self.locks.append("lock")

    def unlock(self, node: TreeNode) -> None:
        self.locks.append("unlock")

    def is_tombstone(self, node: TreeNode) -> bool:
        return node.parts[self.name] is None

    def may_evict(self, node: TreeNode) -> bool:
        return False

    def free(self, node: TreeNode) -> None:
        self.freed.append(node.parts.pop(self.name))

    def evictable_size(self) -> int:
        return 0

    def all_pages(self, nodes: Iterable[TreeNode]) -> np.ndarray:
        return np.empty(0, np.int32)

    def held(self, node: TreeNode) -> int:
        return 0

    def describe(self, node: TreeNode) -> str:
        return f"marked={node.parts[self.name]}"

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        return ((total - 1) // 4 * 4,)


def test_another_component_limits_matches_and_is_asked_at_every_seam() -> None:
    built = memory()
    marked = Marked()
    tree = RadixCache(built.req_to_token_pool, built.allocator, components=[marked])
    pages = built.allocator.alloc_pages(3)
    assert pages is not None
    tree.insert(key(A + B + C), pages)
    assert len(tree.match_prefix(key(A + B + C)).pages) == 3
    assert len(tree.match_prefix(key(A + B)).pages) == 0, "the split left no state at 8 tokens"
    result = tree.match_prefix(key(A + B + C))
    assert len(result.pages) == 3
    assert "marked=state after 12" in tree.pretty_print()
    with tree.locked(result.last_device_node):
        assert marked.locks == ["lock"]
    assert tree.cut_points(request(A), 11) == (8,)
    assert tree.evict(1) == 12, "what is left of the path is of no use"
    assert marked.freed == ["state after 12", None]


def test_pretty_print_shows_every_node() -> None:
    built = memory()
    put(built, A + B)
    put(built, A + C)
    text = built.cache.pretty_print().splitlines()
    assert text[0] == "12 tokens cached, 0 protected"
    assert sorted(line.split(" tokens")[0] for line in text[1:]) == ["    4", "    4", "  4"]


def test_all_values_flatten_names_every_cached_slot() -> None:
    built = memory()
    pages = put(built, A + B)
    assert sorted(built.cache.all_values_flatten().tolist()) == sorted(
        slot for page in pages for slot in range(page * 4, page * 4 + 4)
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 12}, "page_size"),
        ({"max_context_len": 65}, "max_context_tokens"),
        ({"prefix_cache": "magic"}, "prefix_cache"),
        ({"device": "cuda", "shared": True}, "device"),
    ],
)
def test_a_configuration_that_cannot_work_names_its_key(change: dict[str, object], named: str) -> None:
    good: dict[str, object] = {"total_tokens": 64, "max_context_len": 64, "max_running_requests": 1}
    CacheConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**{**good, **change})  # type: ignore[arg-type]
    assert caught.value.key == named
    with pytest.raises(ConfigError):
        KVEventsConfig(buffer_batches=0)


def test_a_key_slice_shares_its_tokens() -> None:
    whole = key(range(10))
    part = whole[2:6]
    assert np.shares_memory(part.tokens, whole.tokens)
    assert part.tokens.tolist() == [2, 3, 4, 5]
    pairs = key(range(10), Namespace("m", is_bigram=True))
    assert len(pairs) == 9
    assert pairs[4:8].tokens.tolist() == [4, 5, 6, 7, 8]
    assert len(pairs[4:4]) == 0
