"""Tenants in a simulation: what is one tenant's is nobody else's, what many ask becomes everybody's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.simulation import Trace
from simulator.tenants import PageNames
from simulator.traces import read_trace
from tests.simulator.test_simulation import replayed, summary

CHAIN = np.array([11, 12, 13], np.int64)


def shared(names: PageNames, tenant: str, now: float, hashes: np.ndarray = CHAIN) -> int:
    """How many pages of a prompt have their public names."""
    return int((names.of(tenant, hashes, now) == hashes).sum())


def test_tenants_share_nothing_unless_told() -> None:
    names = PageNames(0, 1.0)
    assert all(shared(names, f"tenant {number}", float(number)) == 0 for number in range(20))
    first, again = (names.of("a", CHAIN, 30.0) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert not set(first.tolist()) & set(names.of("b", CHAIN, 30.0).tolist())
    assert shared(names, "", 31.0) == len(CHAIN)


def test_pages_become_public_at_the_end_of_an_epoch_when_enough_have_asked() -> None:
    users, names = 4, PageNames(4, 10.0)
    for number in range(users - 1):
        for _ in range(10):
            assert shared(names, f"tenant {number}", 1.0) == 0
    assert shared(names, "tenant 0", 15.0) == 0, "fewer than K have asked"
    for number in range(2 * users):
        assert shared(names, f"other {number}", 16.0) == 0, "the epoch has not ended"
    longer = np.append(CHAIN, 14)
    assert shared(names, "newcomer", 30.0, longer) == len(CHAIN), "the fourth page is the newcomer's"


def test_below_a_page_that_is_private_nothing_is_public() -> None:
    names = PageNames(2, 10.0)
    for number in range(4):
        prompt = np.array([100 + number, 12], np.int64)  # a hash has all before it, so this cannot be
        names.of(f"tenant {number}", prompt, 1.0)
    assert shared(names, "tenant 9", 20.0, np.array([100, 12], np.int64)) == 0


def test_what_tenants_share_saves_computing() -> None:
    trace = read_trace("tenants:1")
    trace = Trace(trace.name, trace.requests[:1200])
    given = {"speed": 1.0, "worker": {"kv_tokens": 300_000}}
    separate = summary(replayed(trace, **given))
    ours = summary(replayed(trace, sharing_min_tenants=2, sharing_epoch_s=10.0, **given))
    everybody = summary(replayed(trace, ignore_tenants=True, **given))
    assert separate.hit_rate < ours.hit_rate < everybody.hit_rate
    assert ours.hit_rate - separate.hit_rate > 0.6 * (everybody.hit_rate - separate.hit_rate)
    nameless = Trace(trace.name, [replace(one, tenant="") for one in trace.requests])
    assert summary(replayed(nameless, **given)).hit_rate == everybody.hit_rate
