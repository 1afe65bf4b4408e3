"""The tree, case by case: isolation, splits, locks, policies, events, and the seam for other components."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from kvcache.components.base import PartReport, TreeComponent
from kvcache.components.full import FullComponent
from kvcache.components.holdings import GroupHoldings
from kvcache.config import CacheConfig, KVEventsConfig
from kvcache.eviction import POLICIES, Evictor
from kvcache.radix_cache import RadixCache
from kvcache.radix_key import Namespace, RadixKey
from kvcache.radix_tree import RadixTree
from kvcache.report import pretty_print
from kvcache.request import CachedRequest
from kvcache.tree_node import COPY, TreeNode
from tests.kvcache.support import (
    NAMESPACE,
    Index,
    cached_tokens,
    key,
    locked,
    matched,
    memory,
    pages_of,
    put,
    radix_cache,
    reference_hashes,
    request,
)
from wire.events import BlockRemoved, encode_batch

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
    assert pages_of(built, result) == pages[:1]
    assert result.device_indices.tolist() == [pages[0] * 4 + i for i in range(4)]
    assert [node.num_tokens for node in built.cache.tree.nodes()] == [4, 8]
    assert matched(built, A + B + C) == 12
    assert cached_tokens(built) == 12


def test_a_bigram_page_needs_one_token_more_and_reports_pairs() -> None:
    built = memory()
    bigram = Namespace("model", is_bigram=True)
    put(built, range(9), bigram)
    assert matched(built, [*range(8), 99], bigram) == 4, "parts in the last token, before any split"
    assert matched(built, range(8), bigram) == 4
    assert matched(built, range(9), bigram) == 8
    (event,) = built.take_events().public
    assert event.token_ids == [[i, i + 1] for i in range(8)]


def test_a_locked_path_survives_eviction_and_a_split_inherits_the_lock() -> None:
    built = memory()
    put(built, A + B)
    with locked(built, A + B):
        put(built, A + C)
        assert (built.cache.tree.protected("full"), built.cache.tree.evictable("full")) == (2, 1)
        assert built.cache.tree.evict("full", 25) == 1
        built.check_memory()
    assert built.cache.tree.evict("full", 25) == 2
    assert cached_tokens(built) == 0
    built.check_memory()


def test_both_parts_of_a_split_have_its_hits_priority_age_and_tenant() -> None:
    built = memory()
    cache = radix_cache(built)
    for _ in range(3):
        pages = built.allocator.alloc_pages(3)
        assert pages is not None
        inserted = cache.insert(RadixKey(A + B + C, NAMESPACE, "tenant"), pages, priority=7)
        built.allocator.free_page_ids(pages[: inserted.prefix_len // 4])
    (whole,) = cache.tree.nodes()
    before = (whole.hit_count, whole.priority, whole.created, whole.tenant)
    assert before[:2] == (2, 7)
    assert matched(built, [*A, 9], tenant="tenant") == len(A)
    upper, lower = cache.tree.nodes()
    for part in (upper, lower):
        assert (part.hit_count, part.priority, part.created, part.tenant) == before


@pytest.mark.parametrize("namespace", [NAMESPACE, Namespace("model", cache_salt="x")], ids=["", "salt"])
def test_tenants_find_nothing_of_each_others(namespace: Namespace) -> None:
    built = memory()
    names = ("", "a", "b", "ab")
    pages = {name: put(built, A + B, namespace, name) for name in names}
    assert len({page for own in pages.values() for page in own}) == 2 * len(names)
    for name in names:
        assert matched(built, A + B + C, namespace, name) == len(A + B)
        put(built, A + C, namespace, name)  # splits this tenant's node, and no other
        assert [node.tenant for node in built.cache.tree.nodes()].count(name) == 3
    assert matched(built, A, namespace, "c") == 0
    built.check_memory()


def test_evicting_one_tenants_copy_leaves_the_others() -> None:
    built, index = memory(), Index()
    for name in ("a", "b", ""):
        put(built, A + B, tenant=name)
    index.read(*built.take_events())
    built.cache.tree.evict("full", 2)
    index.read(*built.take_events())
    assert [matched(built, A + B, tenant=name) for name in ("a", "b", "")] == [0, len(A + B), len(A + B)]
    kept = [name for tenant in ("b", "") for name in reference_hashes(NAMESPACE, A + B, 4, tenant)]
    assert sorted(index.blocks) == sorted(kept)


def test_a_private_page_is_told_on_its_own_stream_by_nothing_but_names() -> None:
    built = memory()
    salted = Namespace("model", extra_key="lora", cache_salt="s")
    put(built, A, salted, tenant="a")
    put(built, A, salted)
    (shared,), (mine,) = (msgpack.unpackb(encode_batch(0.0, events))[1] for events in built.take_events())
    assert mine == {
        "type": "BlockStored", "block_hashes": reference_hashes(salted, A, 4, "a"),
        "parent_block_hash": None, "token_ids": [], "block_size": 4, "lora_id": None, "medium": "GPU",
        "lora_name": None,
    }  # fmt: skip
    assert shared["block_hashes"] == reference_hashes(salted, A, 4)
    assert shared["token_ids"] == A


def test_a_chunked_prefill_is_no_hit_on_itself() -> None:
    built = memory()
    for end in (4, 8, 12):
        put(built, (A + B + C)[:end], chunked=True)
    assert [node.hit_count for node in built.cache.tree.nodes()] == [0, 0, 0]
    put(built, A + B)
    assert [node.hit_count for node in built.cache.tree.nodes()] == [1, 1, 0]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [2, 4, 3, 1]),
        ("mru", [1, 3, 4, 2]),
        ("lfu", [4, 3, 2, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("filo", [4, 3, 2, 1]),
        ("priority", [4, 3, 1, 2]),
        ("slru", [4, 3, 2, 1]),
    ],
)
def test_policies(policy: str, expected: list[int]) -> None:
    built = memory(eviction_policy=policy)
    for name, hits, priority in ((1, 4, 1), (2, 3, 9), (3, 1, 0), (4, 0, 0)):
        for _ in range(hits + 1):
            put(built, [name] * 4, priority=priority)
    for used in (3, 1):
        matched(built, [used] * 4)
    left, gone = {1, 2, 3, 4}, []
    while left:
        assert built.cache.tree.evict("full", 1) == 1
        held = {int(node.token_array()[0]) for node in built.cache.tree.nodes()}
        gone += sorted(left - held)
        left = held
    assert gone == expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=40)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=20),
    data=st.data(),
)
def test_whatever_grew_and_was_used_the_first_in_policy_order_goes(
    policy: str, prompts: list[list[int]], data: st.DataObject
) -> None:
    built = memory(page_size=1, pages=256, eviction_policy=policy)
    tree, order = built.cache.tree, POLICIES[policy]
    for tokens in prompts:
        put(built, tokens, priority=data.draw(st.integers(-1, 2)))
        matched(built, data.draw(st.sampled_from(prompts)))
        if data.draw(st.integers(0, 5)) == 0:
            tree.evict("full", 1)
    while cached_tokens(built):
        leaves = [node for node in tree.nodes() if not node.children]
        tree.evict("full", 1)
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
        with locked(built, A):
            pass
    # Nothing but memory shows how many entries a heap has.
    assert len(built.cache.tree.components[0].evictor._heap) == 1
    falling = memory(eviction_policy="mru")  # its keys change with every use, so an entry is made each time
    put(falling, A)
    for _ in range(1000):
        matched(falling, A)
    assert len(falling.cache.tree.components[0].evictor._heap) < 100


def test_events_are_chained_by_the_written_definition_and_survive_splits() -> None:
    built = memory()
    salted = Namespace("model", extra_key="lora", cache_salt="s")
    put(built, A + B + C, salted)
    put(built, A + C, salted)
    put(built, A + B + C + A, salted)
    first, second, third = built.take_events().public
    assert third.parent_block_hash == first.block_hashes[-1], "the last page above, not the first"
    assert first.block_hashes == reference_hashes(salted, A + B + C, 4)
    assert first.parent_block_hash is None
    assert (first.token_ids, first.block_size, first.medium) == (A + B + C, 4, "GPU")
    assert (first.extra_keys, first.cache_salt) == ([["lora"]] * 3, "s")
    assert second.block_hashes == reference_hashes(salted, A + C, 4)[1:]
    assert second.parent_block_hash == first.block_hashes[0]
    built.cache.tree.evict("full", 25)
    removed = [name for event in built.take_events().public for name in event.block_hashes]
    assert sorted(removed) == sorted(first.block_hashes + second.block_hashes + third.block_hashes)


def test_hashes_are_computed_only_when_events_are_on() -> None:
    silent = memory(events=KVEventsConfig(enable=False))
    put(silent, A)
    assert [node.digests for node in silent.cache.tree.nodes()] == [None]
    assert silent.take_events() == ([], [])


def test_an_overflow_becomes_a_clear_and_a_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    built = memory(events=KVEventsConfig(enable=True, max_queued_events=3))
    index = Index()
    for name in range(6):
        put(built, [name] * 8)
        if name == 0:
            index.read(*built.take_events())
    built.cache.tree.evict("full", 2)
    assert caplog.text.count("not taken in time") == 1
    index.read(*built.take_events())
    expected = [name for i in range(1, 6) for name in reference_hashes(NAMESPACE, [i] * 8, 4)]
    assert sorted(index.blocks) == sorted(expected)
    built.cache.tree.evict("full", 2)
    events, _ = built.take_events()
    assert [type(event) for event in events] == [BlockRemoved], "what follows a snapshot is none"
    index.read(events)
    assert len(index.blocks) == 8


def test_a_tree_that_lost_everything_grows_again() -> None:
    built = memory()
    put(built, A + B)
    built.cache.tree.evict("full", 64)
    assert built.allocator.available_pages() == 64
    assert cached_tokens(built) == 0
    index = Index()
    index.read(*built.take_events())
    assert not index.blocks
    put(built, A)
    assert matched(built, A) == 4
    built.check_memory()


def test_a_node_whose_key_has_fallen_is_evicted_all_the_same() -> None:
    """As of one that comes below a copy, when copies of public pages give way."""
    evictor = Evictor("lru", 8)
    evictor.expect_copies()
    space = Namespace("m")
    above = TreeNode(None, space, b"", b"", 2, 1)
    node, newer = (TreeNode(above, space, b"", b"", 1, tick) for tick in (2, 3))
    newer.parent = None
    for one in (node, newer):
        evictor.offer(one)
    above.offers |= COPY
    assert [evictor.pop(lambda one: True) for _ in range(3)] == [node, newer, None]


class Marked(TreeComponent):
    """A toy group: a match ends at a node that carries a mark, as a state group's would."""

    name = "marked"

    def __init__(self) -> None:
        self.evictor = Evictor("lru", 8)
        self.locks: list[str] = []
        self.freed: list[object] = []

    def valid_lengths(self, path: Sequence[TreeNode], pages: int, with_host: bool = False) -> np.ndarray:
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

    def gather(self, path: Sequence[TreeNode]) -> np.ndarray:
        return np.empty(0, np.int32)

    def evictable(self) -> int:
        return 0

    def protected(self) -> int:
        return 0

    def report(self, node: TreeNode) -> PartReport:
        return PartReport(0, f"marked={node.parts[self.name]}")


class MarkedHoldings(GroupHoldings):
    """What requests hold of it: nothing, but forwards are to end at page borders."""

    name = "marked"

    def insertable(self, req: CachedRequest, length: int) -> int:
        return length

    def offer(self, req: CachedRequest, length: int, ends: bool) -> np.ndarray:
        return np.empty(0, np.int32)

    def adopt(self, req: CachedRequest, cached: np.ndarray) -> None:
        pass

    def release(self, req: CachedRequest) -> None:
        pass

    def cut_points(self, req: CachedRequest, total: int) -> tuple[int, ...]:
        return ((total - 1) // 4 * 4,)


def test_another_component_limits_matches_and_is_asked_at_every_seam() -> None:
    built = memory()
    marked = Marked()
    tree = RadixTree(4, [FullComponent("full", built.allocator, "lru"), marked])
    cache = RadixCache(built.req_to_token_pool, built.allocator, tree, [MarkedHoldings()])
    pages = built.allocator.alloc_pages(3)
    assert pages is not None
    cache.insert(key(A + B + C), pages)
    assert len(cache.match_prefix(key(A + B + C)).device_indices) == 12
    assert len(cache.match_prefix(key(A + B)).device_indices) == 0, "the split left no state at 8 tokens"
    result = cache.match_prefix(key(A + B + C))
    assert len(result.device_indices) == 12
    assert "marked=state after 12" in pretty_print(tree)
    cache.inc_lock_ref(result.last_device_node)
    assert marked.locks == ["lock"]
    cache.dec_lock_ref(result.last_device_node)
    assert marked.locks == ["lock", "unlock"]
    assert cache.cut_points(request(A), 11) == (8,)
    assert cache.tree.evict("full", 1) == 3, "what is left of the path is of no use"
    assert marked.freed == ["state after 12", None]


def test_pretty_print_shows_every_node() -> None:
    built = memory()
    put(built, A + B)
    put(built, A + C)
    text = pretty_print(built.cache.tree).splitlines()
    assert text[0] == "12 tokens cached, 0 protected"
    assert sorted(line.split(" tokens")[0] for line in text[1:]) == ["    4", "    4", "  4"]


def test_all_pages_names_every_cached_page() -> None:
    built = memory()
    pages = [*put(built, A + B), *put(built, C)]
    assert sorted(built.cache.tree.all_pages("full").tolist()) == sorted(pages)
    assert len(built.cache.tree.all_pages("window")) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 12}, "page_size"),
        ({"max_context_len": 65}, "max_context_tokens"),
        ({"total_tokens": 15}, "max_total_tokens"),
        ({"state_slots": 1}, "max_mamba_cache_size"),
        ({"prefix_cache": "magic"}, "prefix_cache"),
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


def test_a_page_has_the_highest_priority_that_asked_for_it() -> None:
    with memory(pages=8, eviction_policy="priority") as built:
        for name, priority in ((1, 9), (2, 5), (1, 0), (2, 6)):
            put(built, [name] * 4, priority=priority)
        built.cache.tree.evict("full", 1)
        assert [matched(built, [name] * 4) for name in (1, 2)] == [4, 0]


def test_a_copy_goes_first_and_takes_a_shorter_end_along() -> None:
    with memory(pages=32) as built:
        own, copied, longer = (list(range(first, first + 32)) for first in (0, 100, 200))
        put(built, own)
        put(built, copied, is_copy=True)
        put(built, [*copied, *range(150, 158)])  # less than the copy was computed below it
        put(built, longer[:8], is_copy=True)
        put(built, longer)  # and more than the copy
        built.cache.tree.evict("full", 10)
        assert [matched(built, one) for one in (own, copied, longer)] == [32, 0, 32]
        built.cache.tree.evict("full", 1)
        assert matched(built, own) < 32, "the oldest of the rest"
