"""Public pages that a tenant seems to guess its way along stop being public. The machines hold the rest."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from kvcache.memory import Memory
from kvcache.tenancy.config import TenancyConfig
from kvcache.tenancy.demotion import BARRED_EPOCHS, GUESS_PAGES
from kvcache.tenancy.promotion import Promotion
from kvcache.tree_node import UNKNOWN, SharedTreeNode, TreeNode
from tests.kvcache.support import Index, key, matched, memory, put, radix_cache

PAGE = 4
COMMON = [7] * (6 * PAGE)
BURST = 3
FOUNDERS = ("a", "b", "c")


@pytest.fixture
def shared() -> Memory:
    """A memory in which three tenants have made a text public."""
    built = memory(PAGE, 64, tenancy=TenancyConfig(users=2, burst=BURST, secret=b"s"))
    make_public(built)
    return built


def make_public(built: Memory) -> None:
    """The common text, by those who compute it."""
    for tenant in FOUNDERS:
        put(built, COMMON, tenant=tenant)
    promotion(built).end_epoch()


def promotion(built: Memory) -> Promotion:
    assert built.promotion is not None
    return built.promotion


def ask(built: Memory, tokens: list[int], tenant: str) -> TreeNode | None:
    """A request is admitted, and ends; where its match ended."""
    found = built.cache.match_prefix(key(tokens, tenant=tenant))
    promotion(built).admitted(tenant, found.last_device_node, len(tokens) - len(found.device_indices))
    put(built, tokens, tenant=tenant)
    return found.last_device_node


def guess(built: Memory, tenant: str, times: int, known: int = 3, more: int = PAGE) -> None:
    """So many continuations, each another one, of the first `known` pages."""
    for i in range(times):
        ask(built, [*COMMON[: known * PAGE], *[100 + i] * more], tenant)


def seen(built: Memory, tenant: str = "stranger") -> int:
    """How many tokens of the common text a tenant finds."""
    return matched(built, COMMON, tenant=tenant)


def test_a_burst_of_guesses_ends_what_is_public_at_the_end_of_the_epoch(shared: Memory) -> None:
    guess(shared, "x", BURST + 1)
    assert seen(shared) == len(COMMON), "within the epoch nothing is to be seen"
    promotion(shared).end_epoch()
    assert seen(shared) == 0
    assert promotion(shared).demotion.demoted_pages == 6
    shared.check_memory({"full": []}, [])


def test_so_many_guesses_are_no_burst(shared: Memory) -> None:
    for _ in range(3):
        guess(shared, "x", BURST)
        promotion(shared).end_epoch()
    assert seen(shared) == len(COMMON)


def test_guesses_of_several_tenants_do_not_add_up(shared: Memory) -> None:
    for tenant in ("x", "y"):
        guess(shared, tenant, BURST)
    promotion(shared).end_epoch()
    assert seen(shared) == len(COMMON)


def test_who_computed_the_text_does_not_guess(shared: Memory) -> None:
    guess(shared, "a", 5 * BURST)
    promotion(shared).end_epoch()
    assert seen(shared) == len(COMMON)


def test_long_prompts_are_no_guesses(shared: Memory) -> None:
    guess(shared, "x", BURST + 2, more=GUESS_PAGES * PAGE)
    promotion(shared).end_epoch()
    assert seen(shared) == len(COMMON)


def test_what_many_tenants_use_stays(shared: Memory) -> None:
    for tenant in ("d", "e", "f", "g"):
        ask(shared, [*COMMON, *[ord(tenant)] * PAGE], tenant)
    guess(shared, "x", BURST + 1)
    promotion(shared).end_epoch()
    assert seen(shared) == len(COMMON)


def test_of_a_common_beginning_what_few_use_goes(shared: Memory) -> None:
    for tenant in ("d", "e", "f", "g"):
        ask(shared, [*COMMON[: 2 * PAGE], *[ord(tenant)] * PAGE], tenant)
    guess(shared, "x", BURST + 1, known=2)
    promotion(shared).end_epoch()
    assert seen(shared) == 2 * PAGE


def test_what_was_public_from_the_start_stays() -> None:
    built = memory(PAGE, 64, tenancy=TenancyConfig(users=2, burst=BURST, secret=b"s"))
    put(built, COMMON)
    guess(built, "x", 5 * BURST)
    promotion(built).end_epoch()
    assert seen(built) == len(COMMON)


def test_without_a_burst_nothing_is_demoted() -> None:
    built = memory(PAGE, 64, tenancy=TenancyConfig(users=2, burst=0, secret=b"s"))
    make_public(built)
    guess(built, "x", 9)
    promotion(built).end_epoch()
    assert seen(built) == len(COMMON)


def test_a_place_is_barred_for_some_epochs(shared: Memory) -> None:
    guess(shared, "x", BURST + 1)
    promotion(shared).end_epoch()
    for tenant in FOUNDERS:
        put(shared, COMMON, tenant=tenant)
    for _ in range(BARRED_EPOCHS - 1):
        promotion(shared).end_epoch()
        assert seen(shared) == 0
        assert seen(shared, "a") == len(COMMON), "what the tenant has computed again is its own"
    promotion(shared).end_epoch()
    assert seen(shared) == len(COMMON)
    guess(shared, "x", BURST + 1)
    promotion(shared).end_epoch()
    assert seen(shared) == 0


def test_what_was_evicted_and_came_back_in_the_epoch_is_demoted(shared: Memory) -> None:
    """As it does from storage, which has no founders."""
    guess(shared, "x", BURST + 1)
    shared.cache.tree.evict("full", 64)
    put(shared, COMMON)
    last = shared.cache.match_prefix(key(COMMON)).last_device_node
    assert isinstance(last, SharedTreeNode)
    last.founders = UNKNOWN
    assert seen(shared) == len(COMMON)
    promotion(shared).end_epoch()
    assert seen(shared) == 0
    shared.check_memory({"full": []}, [])


def test_requests_that_hold_demoted_pages_go_on_and_add_nothing(shared: Memory) -> None:
    own = [*COMMON, *[9] * PAGE]
    put(shared, own, tenant="y")
    last = radix_cache(shared).match_prefix(key(own, tenant="y")).last_device_node
    shared.cache.inc_lock_ref(last)
    guess(shared, "x", BURST + 1)
    free = shared.allocator.available_pages()
    promotion(shared).end_epoch()
    assert [seen(shared), matched(shared, own, tenant="y")] == [0, 0]
    assert last is not None
    assert last.num_pages == 1
    assert not promotion(shared).may_grow(key(own, tenant="y"), last)
    shared.check_memory({"full": []}, [])
    assert shared.allocator.available_pages() == free + 4, "the four guesses"
    put(shared, own, tenant="y")
    shared.cache.dec_lock_ref(last)
    promotion(shared).tick(0.0)
    assert matched(shared, own, tenant="y") == len(own)
    shared.cache.tree.evict("full", 64)
    assert shared.allocator.available_pages() == 64
    shared.check_memory({"full": []}, [])


def test_events_tell_that_public_pages_went(shared: Memory) -> None:
    index = Index()
    last = radix_cache(shared).match_prefix(key(COMMON)).last_device_node
    shared.cache.inc_lock_ref(last)
    index.read(*shared.take_events())
    before = set(index.blocks)
    guess(shared, "x", BURST + 1)
    promotion(shared).end_epoch()
    index.read(*shared.take_events())
    assert len(index.blocks) == 6
    assert not before & set(index.blocks), "under names that nobody asks for, until they are removed"
    shared.cache.dec_lock_ref(last)
    promotion(shared).end_epoch()
    index.read(*shared.take_events())
    assert not index.blocks


def test_a_negative_burst_cannot_be() -> None:
    with pytest.raises(ConfigError, match="sharing_burst"):
        TenancyConfig(users=2, burst=-1)
