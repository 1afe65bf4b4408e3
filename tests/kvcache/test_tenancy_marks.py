"""Prefixes that the operator has named, and prompts that are private for ever, step by step.

The machines over groups and tiers draw both, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from common.secrets import ClusterSecret
from kvcache.common import alloc_for_extend
from kvcache.memory import Memory
from kvcache.request import StateHold, state_slot
from kvcache.storage.config import StorageConfig
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers.config import TierConfig
from tests.kvcache.driver import Driver
from tests.kvcache.support import (
    NAMESPACE,
    HandMover,
    groups,
    key,
    locked,
    matched,
    memory,
    put,
    radix_cache,
    reference_hashes,
    request,
)
from wire.events import BlockStored
from wire.request import NO_MARKS, NOBODY, PromptMarks

PAGE = 4
SECRET = ClusterSecret((b"of the tests of marked pages alone",))
STORED = TierConfig(
    ratio=2.0,
    load_back_threshold=1,
    storage=StorageConfig(backend="tests.kvcache.storage.support:MemoryStore", secret=SECRET),
    model_digest=bytes(32),
    prefetch_policy="wait_complete",
    prefetch_threshold=1,
    prefetch_if_slower=True,
)
SYSTEM = [7] * (3 * PAGE)
NAMED = PromptMarks(public=len(SYSTEM) + 1, whole=len(SYSTEM) + 1)  # one token more than its whole pages


def private_from(page: int) -> PromptMarks:
    return PromptMarks(private_from=page)


def own(tenant: str, pages: int = 1) -> list[int]:
    """The system prompt, and then pages of the tenant's."""
    return [*SYSTEM, *[ord(tenant)] * (pages * PAGE)]


def shared(users: int = 2) -> Memory:
    return memory(PAGE, 64, tenancy=TenancyConfig(users, secret=b"s"))


def end_epoch(built: Memory) -> None:
    assert built.promotion is not None
    built.promotion.end_epoch()


# -- what the operator names ----------------------------------------------------------------------------


@pytest.mark.parametrize("users", [0, 2])
def test_a_named_prefix_is_everybodys_from_the_first_request_on(users: int) -> None:
    built = shared(users)
    put(built, own("a"), tenant="a", marks=NAMED)
    assert matched(built, own("b"), tenant="b", marks=NAMED) == len(SYSTEM)
    assert matched(built, own("a"), tenant="b", marks=NAMED) == len(SYSTEM), "a's own page is a's"
    assert matched(built, own("a"), tenant="a", marks=NAMED) == len(SYSTEM) + PAGE
    assert matched(built, SYSTEM) == len(SYSTEM), "of requests without a tenant, too"
    put(built, own("b"), tenant="b", marks=NAMED)
    assert matched(built, own("b"), tenant="b", marks=NAMED) == len(SYSTEM) + PAGE
    nodes = [(node.tenant, node.num_pages) for node in built.cache.tree.nodes()]
    assert sorted(nodes) == [("", 3), ("a", 1), ("b", 1)]
    with locked(built, SYSTEM):
        built.check_memory({"full": []}, [])


def test_events_give_a_named_prefix_its_public_names() -> None:
    built = shared(0)
    put(built, own("a"), tenant="a", marks=NAMED)
    public, private = (
        [name for event in events if isinstance(event, BlockStored) for name in event.block_hashes]
        for events in built.take_events()
    )
    assert public == reference_hashes(NAMESPACE, own("a"), PAGE)[:3]
    assert private == reference_hashes(NAMESPACE, own("a"), PAGE, "a")[3:]


def test_without_sharing_nothing_but_the_named_prefix_is_shared() -> None:
    """What requests without a tenant have computed is not every tenant's then."""
    built = shared(0)
    put(built, own("x"))
    assert matched(built, own("x"), tenant="a", marks=NAMED) == len(SYSTEM)
    assert matched(built, own("x"), tenant="a") == 0
    put(built, own("x"), tenant="a", marks=NAMED)
    assert matched(built, own("x"), tenant="a", marks=NAMED) == len(SYSTEM) + PAGE
    assert matched(built, own("x"), tenant="b", marks=NAMED) == len(SYSTEM)


@pytest.mark.parametrize("users", [0, 2])
def test_a_prompt_that_begins_with_a_part_shares_that_part(users: int) -> None:
    built = shared(users)
    put(built, own("a"), tenant="a", marks=NAMED)
    other = [*SYSTEM[: 2 * PAGE], 1, 2, 3, 4]
    assert matched(built, other, tenant="b", marks=PromptMarks(public=2 * PAGE)) == 2 * PAGE


def test_copies_from_before_a_prefix_was_named_give_way() -> None:
    built = shared()
    put(built, own("a"), tenant="a")
    put(built, own("b"), tenant="b", marks=NAMED)
    put(built, own("a", 2), tenant="a", marks=NAMED)  # goes on with its copy, or is told to wait
    end_epoch(built)
    for who in "ab":
        assert matched(built, own(who), tenant=who, marks=NAMED) == len(SYSTEM) + PAGE
    assert [node.num_pages for node in built.cache.tree.root.children.values()] == [3]


@pytest.mark.parametrize("whole", [True, False])
def test_a_state_is_left_at_the_end_of_a_named_prefix_only(whole: bool) -> None:
    """Elsewhere in public pages it would show where a tenant's prompt ended."""
    built = memory(PAGE, 64, specs=groups("state"), tenancy=TenancyConfig(2, secret=b"s"))
    marks = NAMED if whole else PromptMarks(public=len(SYSTEM))
    req = request(own("a", 2), tenant="a", marks=marks)
    assert built.states is not None
    req.req_pool_idx, pair = built.req_to_token_pool.alloc(1)[0], built.states.alloc(2)
    req.state_hold = StateHold(pair.tolist())
    assert alloc_for_extend(built, req, len(req.fill_ids))
    assert (len(SYSTEM) in built.cache.cut_points(req, len(req.fill_ids))) == whole
    for end in (len(SYSTEM), len(req.fill_ids)):
        req.state_hold.prefill(end)
        req.kv_committed_len = end
        built.cache.cache_unfinished_req(req, chunked=end < len(req.fill_ids))
    expected = len(SYSTEM) if whole else 0
    assert matched(built, own("b"), tenant="b", marks=NAMED) == expected
    match = built.cache.match_prefix(key(own("a", 2), tenant="a", marks=marks))
    assert len(match.device_indices) == len(req.fill_ids)
    assert state_slot(match.part("state"))
    built.cache.cache_finished_req(req)
    built.req_to_token_pool.free(req.req_pool_idx)
    built.check_memory({"full": [], "state": []}, [])


def test_storage_has_a_named_prefix_under_its_public_names() -> None:
    """Another tenant's prefetch finds it there when the tree has lost it."""
    mover = HandMover()
    built = memory(
        PAGE,
        64,
        mover=mover,
        tenancy=TenancyConfig(0, secret=b"s"),
        tiers=STORED,
    )
    tiers = built.tiers
    assert tiers is not None
    assert tiers.storage is not None
    put(built, own("a"), tenant="a", marks=NAMED)
    _settle(built, mover)
    built.cache.tree.evict("full", 64)
    tiers.host.clear()
    assert not list(built.cache.tree.nodes())
    wanted = key(own("a"), tenant="b", marks=NAMED)
    assert tiers.storage.prefetches.prefetch("b", wanted)
    _settle(built, mover)
    assert tiers.storage.prefetches.arrived("b") == len(SYSTEM), "and not a's own page"
    assert [(node.tenant, node.num_pages) for node in built.cache.tree.nodes()] == [("", 3)]
    assert tiers.storage.prefetches.prefetch("a", key(own("a"), tenant="a", marks=NAMED))
    _settle(built, mover)
    assert sorted((node.tenant, node.num_pages) for node in built.cache.tree.nodes()) == [("", 3), ("a", 1)]
    for user in "ab":
        tiers.storage.prefetches.forget(user)
    built.check_memory({"full": []}, [])


def _settle(built: Memory, mover: HandMover) -> None:
    assert built.tiers is not None
    while mover.waiting or mover.finished or not built.tiers.is_idle:
        mover.do_all()
        built.tiers.poll()


# -- what is private for ever ---------------------------------------------------------------------------


def test_marked_pages_never_become_public() -> None:
    built = shared()
    for tenant in "abcdef":
        put(built, own("x"), tenant=tenant, marks=private_from(1))
        end_epoch(built)
    assert matched(built, own("x"), tenant="g") == PAGE, "the page before the mark"
    for tenant in "abcdef":
        assert matched(built, own("x"), tenant=tenant) == len(SYSTEM) + PAGE
    with locked(built, SYSTEM):
        built.check_memory({"full": []}, [])


@pytest.mark.parametrize("first", [True, False])
def test_marked_wins_over_the_same_pages_unmarked(first: bool) -> None:
    built = shared()
    for marks in (private_from(2), NO_MARKS) if first else (NO_MARKS, private_from(2)):
        put(built, own("x"), tenant="a", marks=marks)
    put(built, own("x"), tenant="b")
    end_epoch(built)
    assert matched(built, own("x"), tenant="g") == 2 * PAGE
    put(built, own("x"), tenant="c")
    put(built, own("x"), tenant="d")
    end_epoch(built)
    assert matched(built, own("x"), tenant="g") == len(SYSTEM) + PAGE, "three have them unmarked"


def test_what_follows_marked_pages_is_marked() -> None:
    built = shared()
    for tenant in "abcd":
        put(built, own("x"), tenant=tenant, marks=private_from(2))
        put(built, own("x", 3), tenant=tenant)  # goes on without a mark
        end_epoch(built)
    assert matched(built, own("x", 3), tenant="g") == 2 * PAGE
    for node in built.cache.tree.nodes():
        assert node.permanently_private == bool(node.tenant)


def test_a_mark_reaches_pages_below_the_request() -> None:
    """An earlier, longer prompt of the tenant's is marked by a shorter one."""
    built = shared()
    put(built, own("x", 3), tenant="a")
    put(built, SYSTEM, tenant="a", marks=private_from(1))
    put(built, own("x", 3), tenant="b")
    put(built, own("x", 3), tenant="c", marks=private_from(0))
    end_epoch(built)
    assert matched(built, own("x", 3), tenant="g") == PAGE


def test_a_marked_copy_gives_nothing_to_public_pages() -> None:
    """It goes; what is below it goes below the public pages, marked."""
    built = memory(PAGE, 64, specs=groups("window"), tenancy=TenancyConfig(2, secret=b"s"))
    offer = np.ones(4, np.int32)
    window = built.allocators["window"]

    def insert(tenant: str, marks: PromptMarks, of: np.ndarray) -> None:
        taken = window.alloc_pages(int(of.sum()))
        assert taken is not None
        offers = np.zeros(4, np.int32)
        offers[of != 0] = taken
        before = set(built.cache.tree.all_pages("window").tolist())
        put(built, own("x"), tenant=tenant, marks=marks, offers={"window": offers})
        kept = set(built.cache.tree.all_pages("window").tolist()) - before
        window.free_page_ids(np.array(sorted(set(taken.tolist()) - kept), np.int32))

    insert("a", private_from(0), offer)
    insert("b", NO_MARKS, np.array([0, 0, 1, 1], np.int32))
    insert("c", NO_MARKS, np.array([0, 0, 1, 1], np.int32))
    insert("d", NO_MARKS, np.array([0, 0, 1, 1], np.int32))
    end_epoch(built)
    (public,) = [node for node in built.cache.tree.nodes() if not node.tenant]
    assert np.count_nonzero(public.parts["window"]) == 2, "the marked copy's window pages are not everybody's"
    assert len(list(built.cache.tree.nodes())) == 1, "every copy has given way"
    built.check_memory({"full": [], "window": []}, [])


def test_without_a_tenant_marked_pages_are_one_requests_own() -> None:
    for users in (0, 2):
        built = shared(users)
        put(built, own("x"), tenant=NOBODY + "5", marks=private_from(2))
        assert matched(built, own("x")) == 2 * PAGE
        assert matched(built, own("x"), tenant=NOBODY + "6", marks=private_from(2)) == 2 * PAGE
        assert matched(built, own("x"), tenant=NOBODY + "5", marks=private_from(2)) == len(SYSTEM) + PAGE


def test_what_the_operator_names_is_public_in_a_marked_prompt_too() -> None:
    built = shared()
    put(built, own("a"), tenant="a", marks=PromptMarks(NAMED.public, NAMED.whole, 0))
    assert matched(built, own("a"), tenant="b", marks=NAMED) == len(SYSTEM)
    assert [node.permanently_private for node in built.cache.tree.nodes()] == [False, True]


def test_a_request_that_adds_nothing_marks_what_it_used() -> None:
    """Its own copy has been superseded, so nothing is added below it."""
    built = shared()
    put(built, own("x"), tenant="a")
    req = request(own("x"), tenant="a", marks=private_from(3))
    match = built.cache.match_prefix(key(own("x"), tenant="a"))
    built.cache.inc_lock_ref(match.last_device_node)
    req.last_node, req.cache_protected_len = match.last_device_node, len(own("x"))
    req.req_pool_idx = built.req_to_token_pool.alloc(1)[0]
    built.req_to_token_pool.write(req.req_pool_idx, 0, match.device_indices)
    req.kv_committed_len = req.kv_allocated_len = len(own("x"))
    put(built, own("b"), tenant="b", marks=NAMED)  # now there is a public copy
    built.cache.cache_finished_req(req)
    built.req_to_token_pool.free(req.req_pool_idx)
    marked = [node.tenant for node in built.cache.tree.nodes() if node.permanently_private]
    assert marked == ["a"]
    end_epoch(built)
    radix_cache(built).tree.evict("full", 64)
    built.check_memory({"full": []}, [])


@pytest.mark.parametrize(("marks", "found"), [(private_from(0), 0), (NO_MARKS, len(SYSTEM))])
def test_public_pages_get_no_window_pages_of_a_marked_prompt(marks: PromptMarks, found: int) -> None:
    built = memory(PAGE, 64, specs=groups("window"), tenancy=TenancyConfig(2, secret=b"s"))
    requests = Driver(built)
    requests.run([*SYSTEM, 1])
    requests.run([*own("x", 3), 1])
    with locked(built, own("x", 3)):  # what is left is the window of the system prompt's end
        built.cache.tree.evict("window", 3)
    assert matched(built, SYSTEM, tenant="b") == 0
    requests.run([*SYSTEM, 1], tenant="a", marks=marks)
    assert matched(built, SYSTEM, tenant="b") == found
    built.check_memory({"full": [], "window": []}, [])


@pytest.mark.parametrize(("marks", "found"), [(private_from(1), 0), (NO_MARKS, len(SYSTEM))])
def test_public_pages_on_the_host_alone_get_no_device_pages_of_a_marked_prompt(
    marks: PromptMarks, found: int
) -> None:
    mover = HandMover()
    built = memory(
        PAGE, 64, mover=mover, tenancy=TenancyConfig(2, secret=b"s"), tiers=TierConfig(ratio=2.0)
    )  # fmt: skip
    requests = Driver(built)
    requests.run([*SYSTEM, 1])
    _settle(built, mover)
    built.cache.tree.evict("full", 64)
    match = built.cache.match_prefix(key([*SYSTEM, 1], tenant="b"))
    assert (len(match.device_indices), match.host_hit_length) == (0, len(SYSTEM))
    requests.run([*SYSTEM, 1], tenant="a", marks=marks)
    assert matched(built, [*SYSTEM, 1], tenant="b") == found
    _settle(built, mover)
    built.check_memory({"full": []}, [])


@pytest.mark.parametrize("kinds", [("state",), ("window", "state")], ids="+".join)
def test_public_pages_that_leave_for_a_state_of_a_marked_prompt_get_nothing_of_it(
    kinds: tuple[str, ...],
) -> None:
    """They come to the tree while the prompt is computed, and go to the host as it needs another slot."""
    mover = HandMover()
    built = memory(
        PAGE, 64, specs=groups(*kinds), mover=mover, tenancy=TenancyConfig(2, secret=b"s"),
        tiers=TierConfig(ratio=2.0), state_slots=3,
    )  # fmt: skip
    requests = Driver(built)
    req = requests.admit([*SYSTEM, 1], tenant="a", marks=private_from(1))
    offers = {group: built.allocators[group].alloc_pages(3 if group == "window" else 1) for group in kinds}
    put(built, SYSTEM, offers=offers)
    _settle(built, mover)
    for _ in requests.prefill(req):
        requests.check()
    assert not any(node.is_resident for node in built.cache.tree.nodes() if not node.tenant)
    match = built.cache.match_prefix(key([*SYSTEM, 1], tenant="b"))
    assert (len(match.device_indices), match.host_hit_length) == (0, len(SYSTEM)), "as before"
    requests.finish(req)
    _settle(built, mover)
    requests.check()


def test_pages_from_storage_are_marked_as_their_request_says() -> None:
    mover = HandMover()
    built = memory(
        PAGE,
        64,
        mover=mover,
        tenancy=TenancyConfig(2, secret=b"s"),
        tiers=STORED,
    )
    tiers = built.tiers
    assert tiers is not None
    assert tiers.storage is not None
    put(built, own("a"), tenant="a")
    _settle(built, mover)
    built.cache.tree.evict("full", 64)
    tiers.host.clear()
    assert tiers.storage.prefetches.prefetch("a", key(own("a"), tenant="a", marks=private_from(2)))
    _settle(built, mover)
    tiers.storage.prefetches.forget("a")
    nodes = [(node.num_pages, node.permanently_private) for node in built.cache.tree.nodes()]
    assert sorted(nodes) == [(2, False), (2, True)]
    built.check_memory({"full": []}, [])
