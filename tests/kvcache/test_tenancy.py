"""Pages that become public, step by step. The machines (test_groups_machine.py) hold the rest."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from kvcache.memory import Memory
from kvcache.radix_tree import evict_all
from kvcache.tenancy.config import TenancyConfig
from kvcache.tenancy.promotion import Promotion
from kvcache.tiers.config import TierConfig
from tests.kvcache.support import HandMover, Index, key, locked, matched, memory, put, radix_cache
from tests.kvcache.test_tiers import rest

PAGE = 4
COMMON = [7] * (3 * PAGE)


def own(tenant: str) -> list[int]:
    """The common text, and then a page of the tenant's."""
    return [*COMMON, *[ord(tenant)] * PAGE]


@pytest.fixture
def shared() -> Memory:
    """A memory in which two or three tenants make pages public."""
    return memory(PAGE, 64, tenancy=TenancyConfig(users=2, secret=b"s"))


def promotion(built: Memory) -> Promotion:
    assert built.promotion is not None
    return built.promotion


def test_what_enough_tenants_have_becomes_everybodys_and_no_more(shared: Memory) -> None:
    for tenant in ("a", "b", "c"):
        put(shared, own(tenant), tenant=tenant)
    assert matched(shared, COMMON, tenant="d") == 0, "before the end of the epoch"
    free = shared.allocator.available_pages()
    promotion(shared).end_epoch()
    assert matched(shared, [*COMMON, 0, 0, 0, 0], tenant="d") == len(COMMON)
    assert [matched(shared, own("a"), tenant=who) for who in ("a", "b", "d")] == [16, 12, 12]
    assert shared.allocator.available_pages() == free + 6, "two copies of three pages are free"
    shared.check_memory({"full": []}, [])


def test_one_tenant_alone_makes_nothing_public(shared: Memory) -> None:
    for _ in range(5):
        put(shared, own("a"), tenant="a")
        promotion(shared).end_epoch()
    assert matched(shared, COMMON, tenant="b") == 0


def test_a_tenant_extends_public_pages_with_its_own(shared: Memory) -> None:
    put(shared, COMMON)  # of everybody
    put(shared, own("a"), tenant="a")
    assert matched(shared, own("a"), tenant="a") == 16
    assert matched(shared, own("a"), tenant="b") == len(COMMON)
    assert matched(shared, own("a")) == len(COMMON)


def test_of_a_copy_and_public_pages_the_longer_way_is_taken_and_of_equal_ones_the_public(
    shared: Memory,
) -> None:
    put(shared, own("a"), tenant="a")  # before anything is public
    put(shared, COMMON[:PAGE])
    assert matched(shared, own("a"), tenant="a") == 16
    put(shared, own("a"))
    match = radix_cache(shared).match_prefix(key(own("a"), tenant="a"))
    assert len(match.device_indices) == 16
    assert match.last_device_node is not None
    assert match.last_device_node.tenant == ""


def test_a_locked_copy_gives_way_at_the_end_of_a_later_epoch(shared: Memory) -> None:
    for tenant in ("a", "b", "c"):
        put(shared, COMMON, tenant=tenant)
    held = [radix_cache(shared).match_prefix(key(COMMON, tenant=who)).last_device_node for who in "abc"]
    for node in held:
        shared.cache.inc_lock_ref(node)
    promotion(shared).end_epoch()
    assert promotion(shared).merged_copies == 0
    for node in held:
        shared.cache.dec_lock_ref(node)
    promotion(shared).end_epoch()
    assert promotion(shared).merged_copies == 2
    assert matched(shared, COMMON, tenant="d") == len(COMMON)
    with locked(shared, COMMON):
        shared.check_memory({"full": []}, [])


@pytest.mark.parametrize("own_pages", [0, 1], ids=["a leaf", "with a page of its own"])
@pytest.mark.parametrize("more", [[], [8] * PAGE], ids=["one node", "with one below"])
def test_a_copy_on_the_device_gives_its_pages_to_public_ones_on_the_host(
    more: list[int], own_pages: int
) -> None:
    mover, tenancy = HandMover(), TenancyConfig(users=2, secret=b"s")
    common = [*COMMON, *more]
    kept = [*common, *[ord("b")] * PAGE * own_pages]  # the tenant's whose copy stays on the device
    with memory(PAGE, 64, mover=mover, tiers=TierConfig(ratio=2.0), tenancy=tenancy) as built:
        for tenant in ("a", "b", "c"):
            put(built, COMMON, tenant=tenant)
            put(built, kept if tenant == "b" else [*common, *[ord(tenant)] * PAGE], tenant=tenant)
        rest(built, mover)
        copy = radix_cache(built).match_prefix(key(kept, tenant="b"))
        held = copy.device_indices.tolist()
        assert len(held) == len(kept)
        built.cache.inc_lock_ref(copy.last_device_node)
        promotion(built).end_epoch()
        rest(built, mover)
        evict_all(built.cache.tree)
        assert matched(built, common, tenant="d") == 0, "public pages are on the host alone"
        built.cache.dec_lock_ref(copy.last_device_node)
        merged, index = promotion(built).merged_copies, Index()
        index.read(*built.take_events())
        promotion(built).end_epoch()
        index.read(*built.take_events())
        assert index.blocks.keys() == told_now(built)
        assert promotion(built).merged_copies > merged
        public = built.cache.match_prefix(key([*common, 0, 0, 0, 0], tenant="d"))
        assert public.device_indices.tolist() == held[: len(common)], "nothing was computed or loaded"
        assert matched(built, kept, tenant="b") == len(held)
        built.check_memory({"full": []}, [])
        evict_all(built.cache.tree)
        assert built.check_memory({"full": []}, []).free_pages == built.num_pages


def told_now(built: Memory) -> set[int]:
    """The names of all pages on the device, as who comes too late learns them."""
    late = Index()
    public, private = (list(part.batches(at_most=3)) for part in built.snapshot())
    for batch in public:
        late.read(batch)
    for batch in private:
        late.read((), batch)
    return set(late.blocks)


def test_thresholds_lie_between_k_and_2k() -> None:
    needed = set()
    for start in range(40):
        built = memory(PAGE, 64, tenancy=TenancyConfig(users=3, secret=bytes([start])))
        for count in range(1, 7):
            put(built, COMMON, tenant=f"t{count}")
            promotion(built).end_epoch()
            if matched(built, COMMON, tenant="other"):
                needed.add(count)
                break
    assert needed == {3, 4, 5}


def test_a_single_user_cannot_be_enough() -> None:
    with pytest.raises(ConfigError, match="sharing_min_tenants"):
        TenancyConfig(users=1)


def test_a_page_that_a_tenant_has_in_a_locked_copy_is_not_added_below_public_ones(shared: Memory) -> None:
    for tenant in ("a", "b", "c"):
        put(shared, own(tenant), tenant=tenant)
    copy = radix_cache(shared).match_prefix(key(own("b"), tenant="b")).last_device_node
    shared.cache.inc_lock_ref(copy)
    promotion(shared).end_epoch()
    public = radix_cache(shared).match_prefix(key(COMMON, tenant="d")).last_device_node
    assert promotion(shared).may_grow(key([*COMMON, *[0] * PAGE], tenant="b"), public)
    assert not promotion(shared).may_grow(key(own("b"), tenant="b"), public)
    assert promotion(shared).may_grow(key(own("d"), tenant="d"), public)
    shared.cache.dec_lock_ref(copy)
    promotion(shared).end_epoch()
    assert promotion(shared).may_grow(key([*COMMON, *[0] * PAGE], tenant="b"), public)
