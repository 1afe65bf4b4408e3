"""Modelled host memory, storage and fetches: they save computing, lose nothing, and the index follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cache import PrefixCache
from simulator.modelled_tier import ModelledTier
from simulator.simulation import Simulation, Trace
from simulator.traces import read_trace
from tests.simulator.test_simulation import PAGE, options, replayed, shared_prefixes, summary

SMALL = {"kv_tokens": 60_000}


def computed(simulation: Simulation) -> int:
    return sum(one.prefilled_tokens for one in simulation.members.everyone)


def chats(requests: int = 1500) -> Trace:
    trace = read_trace("chat:1")
    return Trace(trace.name, trace.requests[:requests])


def test_host_memory_raises_the_hit_rate() -> None:
    without, small, large = (
        summary(replayed(chats(), speed=1.0, worker={"kv_tokens": 100_000, "hicache_ratio": ratio}))
        for ratio in (0.0, 2.0, 4.0)
    )
    assert without.loaded_rate == 0.0
    assert without.hit_rate < small.hit_rate < large.hit_rate
    assert large.hit_rate > without.hit_rate + 0.05
    assert large.loaded_rate > 0.0


def test_storage_serves_what_host_memory_evicted() -> None:
    host, storage = (
        summary(
            replayed(chats(), worker={"kv_tokens": 60_000, "hicache_ratio": 1.2, "storage_tokens": tokens})
        )
        for tokens in (0, 2_000_000)
    )
    assert storage.hit_rate > host.hit_rate


def test_the_size_in_gigabytes_counts_instead_of_the_ratio() -> None:
    worker = options(worker={"hicache_ratio": 3.0, "hicache_size": 0.32768, "kv_bytes_per_token": 32_768})
    assert worker.worker.host_tokens == 10_000
    assert options(worker={"hicache_ratio": 0.5, "kv_tokens": 1000}).worker.host_tokens == 500
    assert options().worker.host_tokens == 0


def test_loading_takes_time() -> None:
    fast, slow = (
        summary(
            replayed(
                shared_prefixes(rate=2.0),
                worker={**SMALL, "hicache_ratio": 4.0, "load_bytes_per_s": rate},
            )
        )
        for rate in (400e9, 10e9)
    )
    assert fast.loaded_rate > 0
    assert fast.ttft_p50 < slow.ttft_p50


@pytest.mark.parametrize("policy", ["kv", "round-robin"])
def test_fetching_lowers_what_is_computed(policy: str) -> None:
    """A pool of two holds half of the prefixes."""
    apart, fetched = (
        replayed(shared_prefixes(), policy=policy, peer_fetch=fetch, worker={"kv_tokens": 200_000})
        for fetch in (False, True)
    )
    assert summary(apart).fetched_rate == 0.0
    assert summary(fetched).fetched_rate > 0.0
    assert computed(fetched) <= (1.0 if policy == "kv" else 0.9) * computed(apart)


def test_prefix_affinity_fetches_nothing() -> None:
    assert summary(replayed(shared_prefixes(), policy="prefix-affinity", peer_fetch=True)).fetched_rate == 0.0


def test_a_slow_network_fetches_nothing_that_is_computed_sooner() -> None:
    slow = replayed(
        shared_prefixes(), policy="round-robin", peer_fetch=True, worker={"link_bytes_per_s": 1e9}
    )
    assert summary(slow).fetched_rate == 0.0


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("policy", ["kv", "round-robin"])
@pytest.mark.parametrize("schedule", ["prefill-first", "decode-first", "mixed"])
@pytest.mark.parametrize("prefill", [0, 3])
def test_nothing_is_lost_with_all_tiers_under_restarts(policy: str, schedule: str, prefill: int) -> None:
    """`replayed` compares every router's index with all tiers, and that memory balances."""
    simulation = replayed(
        shared_prefixes(rate=12.0, restarts=4), policy=policy, prefill=prefill, decode=2, peer_fetch=True,
        lease_s=1.5,
        worker={**SMALL, "schedule": schedule, "hicache_ratio": 1.5, "storage_tokens": 200_000},
    )  # fmt: skip
    assert all(one.ended for one in simulation.requests)


def test_fetches_in_a_pool_that_is_too_small_end() -> None:
    replayed(
        shared_prefixes(rate=40.0),
        policy="round-robin",
        peer_fetch=True,
        worker={"kv_tokens": 26_000, "max_running": 4, "hicache_ratio": 4.0},
    )


def test_a_run_with_tiers_is_a_function_of_its_seed() -> None:
    given_: dict[str, Any] = {"peer_fetch": True, "worker": {**SMALL, "hicache_ratio": 2.0}}
    one, other = (replayed(shared_prefixes(), **given_) for _ in range(2))
    assert [r.last_at for r in one.requests] == [r.last_at for r in other.requests]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=60), st.integers(1, 20))
def test_a_lower_tier_keeps_prefixes_and_what_leaves_goes_below(
    paths: list[tuple[int, int]], capacity: int
) -> None:
    told: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
    storage = ModelledTier(10, told["STORAGE"].update, told["STORAGE"].difference_update)
    host = ModelledTier(capacity, told["CPU"].update, told["CPU"].difference_update, storage)
    for family, length in paths:
        path = [100 * family + page for page in range(length)]
        host.put(path)
        storage.touch(path)
        assert (host.pages(), storage.pages()) == (told["CPU"], told["STORAGE"])
        assert len(host.pages()) <= capacity
        assert len(storage.pages()) <= 10
        assert all(page - 1 in host.pages() for page in host.pages() if page % 100)
        assert set(path[:capacity]) <= host.pages()


def test_copies_are_evicted_before_what_was_computed() -> None:
    cache = PrefixCache(6 * PAGE, PAGE, lambda _: None, lambda _: None)
    computed_, copied, new = (np.arange(first, first + 3) for first in (0, 10, 20))
    none = computed_[:0]
    for path, copies in ((computed_, False), (copied, True), (new[:2], False)):
        assert cache.hold(len(path) * PAGE)
        cache.insert(none, path, copies)
        cache.unlock(path)
    assert cache.pages() == {0, 1, 2, 10, 20, 21}
    cache.lock(copied[:1])
    assert cache.hold(PAGE)
    cache.insert(copied[:1], np.array([99]))  # computed below a copy: it is none any more
    cache.unlock(np.array([10, 99]))
    assert cache.hold(3 * PAGE)
    assert cache.pages() == {20, 10, 99}
