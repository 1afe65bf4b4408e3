"""TenantRemoval: what goes belongs to the tenant, and every pool balances after each step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from common.secrets import ClusterSecret
from kvcache.memory import Memory
from kvcache.storage.config import StorageConfig
from kvcache.tenancy.config import TenancyConfig
from kvcache.tenancy.removal import Removed, TenantRemoval
from kvcache.tiers.config import TierConfig
from tests.kvcache.support import HandMover, groups, key, locked, matched, memory, put, radix_cache
from wire.page_hash import tenant_key

STORAGE = StorageConfig(
    backend="tests.kvcache.storage.support:MemoryStore",
    secret=ClusterSecret((b"of the tests of a tenant's removal.",)),
)
PAGE = 4
BYTES = {"full": 100, "window": 10, "state": 1}


def removal(built: Memory, goes: Callable[[str], bool] = lambda owner: owner == "a") -> TenantRemoval:
    made = TenantRemoval(built.cache.tree, BYTES, goes)
    made.begin()
    return made


def whole_pass(built: Memory, made: TenantRemoval, at_once: int = 1) -> dict[str, Removed]:
    while (told := made.step(at_once)) is None:
        built.check_memory()
    return told


def test_what_is_locked_stays_for_a_later_pass() -> None:
    built = memory(PAGE, 64)
    put(built, range(8), tenant="a")
    put(built, range(24), tenant="a")
    put(built, range(24), tenant="b")
    match = radix_cache(built).match_prefix(key(range(8), tenant="a"))
    built.cache.inc_lock_ref(match.last_device_node)
    told = whole_pass(built, removal(built))
    assert (told["a"].nodes, told["a"].pages["device"], told["a"].left_pages) == (1, 4, 2)
    assert told["a"].bytes["device"] == 400
    assert matched(built, range(24), tenant="a") == 8
    built.cache.dec_lock_ref(match.last_device_node)
    assert whole_pass(built, removal(built))["a"].left_pages == 0
    assert (matched(built, range(24), tenant="a"), matched(built, range(24), tenant="b")) == (0, 24)
    assert whole_pass(built, removal(built)) == {}
    assert built.check_memory().free_pages == 64 - 6


def test_the_upper_part_of_a_node_that_was_split_goes_too() -> None:
    built = memory(PAGE, 64)
    put(built, range(24), tenant="a")
    made = removal(built)
    put(built, [*range(8), 7, 7, 7, 7], tenant="a")
    whole_pass(built, made)
    assert not list(built.cache.tree.nodes())


def test_nodes_that_are_split_or_go_between_two_steps() -> None:
    built = memory(PAGE, 64)
    for start in (0, 100):
        put(built, range(start, start + 24), tenant="a")
    made = removal(built)
    assert made.step(1) is None  # one prefix is listed
    for start in (0, 100):
        put(built, [*range(start, start + 8), 7, 7, 7, 7], tenant="a")
    built.cache.tree.evict("full", 5)
    whole_pass(built, made)
    whole_pass(built, removal(built))
    assert not list(built.cache.tree.nodes())
    assert built.check_memory().free_pages == 64


def test_public_pages_stay_and_what_is_below_them_goes() -> None:
    built = memory(PAGE, 64, tenancy=TenancyConfig(users=2, secret=b"s"))
    old, new = tenant_key("a"), tenant_key("a", 5)
    put(built, range(12))
    for owner in (old, new, "b"):
        put(built, range(24), tenant=owner)
    told = whole_pass(built, removal(built, lambda owner: owner == old))
    assert told["a"].pages["device"] == 3
    assert [matched(built, range(24), tenant=owner) for owner in (old, new, "b")] == [12, 24, 24]
    whole_pass(built, removal(built, lambda owner: True))
    assert built.cache.tree.evict("full", 64) == 3, "what is a leaf now can be evicted"


def test_what_is_being_stored_stays_for_a_later_pass() -> None:
    mover = HandMover()
    tiers = TierConfig(ratio=2.0, load_back_threshold=1, storage=STORAGE, model_digest=bytes(32))
    with memory(PAGE, 32, mover=mover, tiers=tiers, max_context_len=64) as built:
        assert built.tiers is not None
        put(built, range(24), tenant="a")
        assert mover.do("backups")
        built.tiers.poll()
        assert mover.count("writes") == 1
        told = whole_pass(built, removal(built))["a"]
        assert (told.nodes, told.left_pages) == (0, 6)
        mover.do_all()
        built.tiers.poll()
        told = whole_pass(built, removal(built))["a"]
        assert (told.nodes, told.left_pages) == (1, 0)
        assert told.pages == {"device": 6, "host": 6}
        assert built.tiers.host.pool.arenas["full"].allocator.available_pages() == 64


@pytest.mark.parametrize("kinds", [(), ("window",), ("state",), ("window", "state")])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_random_trees_with_a_host_tier(kinds: tuple[str, ...], policy: str) -> None:
    """While copies end late, or fail: what is left after all of them goes with the last pass."""
    draw, mover = random.Random(19), HandMover()
    tiers = TierConfig(ratio=2.0, write_policy=policy, load_back_threshold=1)
    with memory(PAGE, 48, specs=groups(*kinds), mover=mover, tiers=tiers, max_context_len=64) as built:
        assert built.tiers is not None
        for _ in range(60):
            tokens = [draw.randrange(2) for _ in range(PAGE * draw.randrange(1, 8))]
            owner = draw.choice(["a", "b", ""])
            needed = {"full": len(tokens) // PAGE, "window": len(tokens) // PAGE, "state": 1}
            offers = {}
            for group in ("full", *kinds):
                built.cache.tree.evict(group, needed[group])
                offers[group] = built.allocators[group].alloc_pages(needed[group])
            pages = offers.pop("full")
            if pages is None or any(part is None for part in offers.values()):
                built.free({g: part for g, part in {"full": pages, **offers}.items() if part is not None})
                continue
            result = radix_cache(built).insert(
                key(tokens, tenant=owner),
                pages,
                offers={g: part for g, part in offers.items() if part is not None},
            )
            built.allocator.free_page_ids(pages[: result.prefix_len // PAGE])
            for group in kinds:
                part, kept = offers[group], set(built.cache.tree.all_pages(group).tolist())
                assert part is not None
                built.allocators[group].free_page_ids(part[[page not in kept for page in part.tolist()]])
            for _ in range(draw.randrange(3)):
                if mover.waiting:
                    mover.do(mover.waiting[0][0], fails=draw.random() < 0.1)
                built.tiers.poll()
            if draw.random() < 0.2:
                whole_pass(built, removal(built), draw.randrange(1, 9))
        while mover.waiting or mover.finished:
            mover.do_all()
            built.tiers.poll()
        others = [node for node in built.cache.tree.nodes() if node.tenant != "a"]
        told = whole_pass(built, removal(built)).get("a", Removed())
        assert told.left_pages == 0
        assert [node for node in built.cache.tree.nodes() if node.tenant == "a"] == []
        assert set(others) >= set(built.cache.tree.nodes())
        with locked(built, [0] * PAGE):
            built.check_memory()
