"""Shares of KV memory per tenant, step by step. test_shares_machine.py holds the rest."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from common.errors import ConfigError
from kvcache import eviction
from kvcache.memory import Memory
from kvcache.radix_tree import RadixTree
from kvcache.shares.config import SharesConfig, TenantShare
from kvcache.shares.evictor import SharedEvictor
from kvcache.tenancy.config import TenancyConfig
from scheduler.metrics import SchedulerMetrics
from tests.kvcache.driver import Driver
from tests.kvcache.support import groups, key, matched, memory, put, radix_cache
from worker.figures import worker_figures

PAGE = 4


def held(built: Memory, group: str = "full") -> dict[str, int]:
    """Pages on the tree by tenant, as the eviction's own books say."""
    (pages,) = [c.tenants for c in built.cache.tree.components if c.name == group]
    assert pages is not None
    return pages.held


def pages_of_text(text: str, pages: int = 1) -> list[int]:
    """A prompt of so many pages, which begins like no other text's."""
    return [ord(text[0]), *map(ord, text[1:]), *[1] * (pages * PAGE - len(text))]


def shared(pages: int = 16, **named: TenantShare) -> Memory:
    return memory(PAGE, pages, shares=SharesConfig(named, TenantShare()))


def test_what_is_above_the_guarantee_goes_first_in_the_policys_order() -> None:
    built = shared(a=TenantShare(min_share=0.25))  # 4 pages
    for name in "ABCDEF":
        put(built, pages_of_text(name), tenant="a")
    for name in "GHIJ":
        put(built, pages_of_text(name), tenant="b")
    tree = built.cache.tree
    tree.evict("full", 4)  # a can spare two of its six, and they are the oldest
    assert held(built) == {"a": 4, "b": 2}
    assert [matched(built, pages_of_text(name), tenant="b") for name in "GHIJ"] == [0, 0, 4, 4]
    tree.evict("full", 2)
    assert held(built) == {"a": 4}
    tree.evict("full", 1)
    assert held(built) == {"a": 3}, "guaranteed pages go when there is nothing else"
    built.check_memory()


def test_a_leaf_that_would_take_its_tenant_below_its_share_goes_after_what_can_be_spared() -> None:
    built = shared(a=TenantShare(min_share=0.25))
    put(built, pages_of_text("long", 6), tenant="a")
    put(built, pages_of_text("b"), tenant="b")
    put(built, pages_of_text("c"), tenant="c")
    built.cache.tree.evict("full", 2)
    assert held(built) == {"a": 6}
    put(built, pages_of_text("other", 2), tenant="a")
    built.cache.tree.evict("full", 1)
    assert held(built) == {"a": 2}, "it has more than its share, so that goes before nothing"


def test_what_is_in_use_is_kept_and_guaranteed_pages_go_for_it() -> None:
    built = shared(pages=4, a=TenantShare(min_share=0.5), b=TenantShare(min_share=0.5))
    for name, tenant in ("Aa", "Ba", "Cb", "Db"):
        put(built, pages_of_text(name), tenant=tenant)
    nodes = [radix_cache(built).match_prefix(key(pages_of_text(name), tenant="a")) for name in "AB"]
    for match in nodes:
        built.cache.inc_lock_ref(match.last_device_node)
    assert built.primary.available_pages() == 2
    pages = built.primary.alloc(2)
    assert pages is not None, "all that is counted as evictable can be evicted"
    assert held(built) == {"a": 2}
    built.primary.free(pages.tolist())
    for match in nodes:
        built.cache.dec_lock_ref(match.last_device_node)
    built.check_memory()


def test_a_tenant_above_its_most_evicts_its_own_oldest_pages() -> None:
    built = shared(a=TenantShare(max_share=0.25))
    driver = Driver(built)
    put(built, pages_of_text("z"), tenant="z")
    for name in "ABCDEF":
        driver.run([*pages_of_text(name), 9], tenant="a")
    assert held(built) == {"a": 4, "z": 1}, "and others lose nothing, though older"
    assert [matched(built, pages_of_text(name), tenant="a") for name in "ABCDEF"] == [0, 0, 4, 4, 4, 4]
    driver.check()


def test_under_pressure_those_above_their_most_go_first() -> None:
    built = shared(a=TenantShare(max_share=0.125))
    put(built, pages_of_text("z"), tenant="z")
    for name in "ABC":
        put(built, pages_of_text(name), tenant="a")
    built.cache.tree.evict("full", 1)
    assert held(built) == {"a": 2, "z": 1}
    built.cache.tree.evict("full", 1)
    assert held(built) == {"a": 2}, "it is at its most now, and z's page is older"


def test_public_pages_are_nobodys_and_go_after_the_private_ones_below_them() -> None:
    built = memory(PAGE, 16, tenancy=TenancyConfig(2, secret=b"s"))
    put(built, [7] * PAGE)
    put(built, [*[7] * PAGE, *[8] * PAGE], tenant="a")
    assert held(built) == {"": 1, "a": 1}
    built.cache.tree.evict("full", 1)
    assert held(built) == {"": 1}


def test_pages_change_owners_with_their_nodes() -> None:
    tenancy = TenancyConfig(2, secret=b"s")
    built = memory(PAGE, 32, specs=groups("window", "state"), tenancy=tenancy, window_tokens=32 * PAGE)
    driver = Driver(built)
    for tenant in "abc":
        driver.run([*[7] * 2 * PAGE, *[ord(tenant)] * PAGE, 1], tenant=tenant)
    assert held(built) == {"a": 3, "b": 3, "c": 3}
    built.cache.tree.evict("window", 1)  # a's copy, which becomes public, takes from another what it lacks
    assert built.promotion is not None
    built.promotion.end_epoch()
    assert held(built) == {"": 2, "a": 1, "b": 1, "c": 1}
    driver.check()
    for group in ("window", "state", "full"):
        built.cache.tree.evict(group, 3)
        driver.check()


def test_a_leaf_that_becomes_public_is_evicted_as_a_public_one() -> None:
    tenancy, shares = TenancyConfig(2, secret=b"s"), SharesConfig({"": TenantShare(min_share=0.5)})
    built = memory(PAGE, 16, tenancy=tenancy, shares=shares)
    for tenant in "abc":
        put(built, [7] * PAGE, tenant=tenant)
    put(built, pages_of_text("new"), tenant="a")
    assert built.promotion is not None
    built.promotion.end_epoch()
    assert held(built) == {"": 1, "a": 1}
    built.cache.tree.evict("full", 1)
    assert held(built) == {"": 1}


def test_what_becomes_public_costs_no_look_at_all_that_its_tenant_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heap is built anew only when a half of its entries are old."""
    built = memory(PAGE, 512, tenancy=TenancyConfig(2, secret=b"s"))
    for number in range(40):
        put(built, pages_of_text(chr(1000 + number)), tenant="a")
    for number, tenant in itertools.product(range(20), "abc"):
        put(built, pages_of_text(chr(100 + number)), tenant=tenant)
    built_anew = Counter[str]()
    monkeypatch.setattr(eviction.heapq, "heapify", lambda heap: built_anew.update(["heap"]))
    assert built.promotion is not None
    built.promotion.end_epoch()
    assert built_anew.total() == 0
    monkeypatch.undo()
    assert held(built) == {"": 20, "a": 40}
    assert built.cache.tree.evict("full", 1000) == 60


@pytest.mark.parametrize("kinds", [(), ("window", "state")])
def test_entries_of_what_has_become_public_do_not_pile_up(kinds: tuple[str, ...]) -> None:
    built = memory(
        PAGE, 512, specs=groups(*kinds), tenancy=TenancyConfig(2, secret=b"s"), state_slots=600,
        window_tokens=512 * PAGE,
    )  # fmt: skip
    driver = Driver(built)
    assert built.promotion is not None
    for number in range(150):
        for tenant in "abc":
            driver.run([*pages_of_text(chr(100 + number)), 9], tenant=tenant)
        built.promotion.end_epoch()
    assert held(built) == {"": 150}
    for component in built.cache.tree.components:
        assert isinstance(component.evictor, SharedEvictor)
        for tenant, queue in component.evictor._queues.items():
            assert len(queue.nodes._heap) <= 66 or not tenant
    assert built.cache.tree.evict("full", 1000) == 150
    driver.check()


@pytest.mark.parametrize("shares", [SharesConfig(), SharesConfig({"a": TenantShare(max_share=0.9)})])
def test_what_comes_below_a_fetched_copy_as_its_own_copy_is_folded_goes_first(shares: SharesConfig) -> None:
    """The order of evictions says so (copies_first): its place in the queue was another before."""
    built = memory(PAGE, 16, tenancy=TenancyConfig(2, secret=b"s"), shares=shares, eviction_policy="fifo")
    document = pages_of_text("document", 3)
    put(built, pages_of_text("old"), tenant="a")
    put(built, document[: 2 * PAGE], tenant="a")
    put(built, document, tenant="a")
    put(built, document[: 2 * PAGE], is_copy=True)
    assert built.promotion is not None
    built.promotion.end_epoch()
    assert held(built) == {"": 2, "a": 2}
    built.cache.tree.evict("full", 1)
    assert matched(built, document, tenant="a") == 2 * PAGE
    assert matched(built, pages_of_text("old"), tenant="a") == PAGE
    built.check_memory()


def test_a_tenant_that_grows_is_again_in_the_order_of_all() -> None:
    built = shared(a=TenantShare(min_share=0.125))
    for name, tenant in ("Aa", "Ba", "Cb", "Db"):
        put(built, pages_of_text(name), tenant=tenant)
    tree = built.cache.tree
    tree.evict("full", 1)  # C: of a nothing can be spared
    assert held(built) == {"a": 2, "b": 1}
    put(built, pages_of_text("E"), tenant="a")
    tree.evict("full", 1)  # A: it is older than D
    assert held(built) == {"a": 2, "b": 1}


def test_states_have_shares_of_their_own() -> None:
    named = {"a": TenantShare(min_share=0.5)}
    built = memory(PAGE, 64, specs=groups("state"), state_slots=12, shares=SharesConfig(named))
    driver = Driver(built)
    for name in "AB":
        driver.run([*pages_of_text(name), 9], tenant="a")
    for name in "CDEFGHIJKLMNOP":
        driver.run([*pages_of_text(name), 9], tenant="noisy")
    assert [matched(built, pages_of_text(name), tenant="a") for name in "AB"] == [PAGE, PAGE]
    assert held(built, "state")["a"] == 2
    driver.check()


def hits(built: Memory, burst: int) -> float:
    """The part of their prompts that three tenants with ten texts of two pages each find, while a fourth
    inserts `burst` pages that nobody asks for again."""
    driver, chance = Driver(built), random.Random(4)
    texts = {tenant: [pages_of_text(f"{tenant}{i}", 2) for i in range(10)] for tenant in "abc"}
    found: Counter[str] = Counter()
    fresh = itertools.count(1000)
    for tenant, text in [(tenant, text) for tenant, own in texts.items() for text in own]:
        driver.run([*text, 9], tenant=tenant)
    for _ in range(60):
        for _ in range(burst // 240):
            driver.run([*[next(fresh)] * 4 * PAGE, 9], tenant="noisy")
        for tenant in texts:
            found[tenant] += driver.run([*chance.choice(texts[tenant]), 9], tenant=tenant)
    driver.check()
    return sum(found.values()) / (3 * 60 * 2 * PAGE)


def test_others_keep_their_hits_beside_a_noisy_tenant() -> None:
    each = {tenant: TenantShare(min_share=0.25) for tenant in "abc"}
    quiet = hits(memory(PAGE, 96, shares=SharesConfig(each)), burst=0)
    assert quiet == 1.0
    assert hits(memory(PAGE, 96), burst=960) < 0.5 * quiet, "without shares the burst costs the others theirs"
    assert hits(memory(PAGE, 96, shares=SharesConfig(each)), burst=960) >= 0.9 * quiet
    capped = SharesConfig({"noisy": TenantShare(max_share=0.25)})
    assert hits(memory(PAGE, 96, shares=capped), burst=960) >= 0.9 * quiet


def test_hits_survive_for_every_kind_of_group() -> None:
    each = SharesConfig({tenant: TenantShare(min_share=0.25) for tenant in "abc"})
    for kinds in (("window",), ("state",), ("window", "state")):
        options = {"specs": groups(*kinds), "state_slots": 96, "window_tokens": 96 * PAGE}
        assert hits(memory(PAGE, 96, shares=each, **options), burst=960) >= 0.9, kinds


def test_a_share_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_share"):
        TenantShare(min_share=0.5, max_share=0.25)
    with pytest.raises(ConfigError, match=r"is not in \[0, 1\]"):
        TenantShare(max_share=1.5)
    with pytest.raises(ConfigError, match="together"):
        SharesConfig({"a": TenantShare(0.6), "b": TenantShare(0.6)})


def test_nothing_is_counted_without_shares() -> None:
    tree: RadixTree = memory(PAGE, 16).cache.tree
    assert [component.tenants for component in tree.components] == [None]


def test_a_workers_record_names_the_tenants_with_most_pages() -> None:
    built = memory(PAGE, 256, tenancy=TenancyConfig(2, secret=b"s"))
    for number in range(70):
        put(built, pages_of_text(chr(65 + number), 1 + number // 35), tenant=f"t{number}")
    figures = worker_figures(built, SchedulerMetrics())
    assert len(figures.tenant_pages) == 64
    assert figures.tenant_pages["t69"] == 2
    assert sum(figures.tenant_pages.values()) + figures.other_tenants_pages == 105
    assert worker_figures(memory(PAGE, 16), SchedulerMetrics()).tenant_pages == {}
