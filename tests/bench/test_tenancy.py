"""bench.tenancy serves tenants what is theirs and everybody's, counts what is not, and what a mode saves."""

from __future__ import annotations

from collections import defaultdict

import pytest

from bench.tenancy import serve
from bench.tenancy_rig import sharing
from bench.tenancy_trace import FEWEST_READERS, LENGTH_S, TenantRequest, TenantTraces, overheard

LATEST_S = 200.0


@pytest.fixture(scope="module")
def usual() -> list[TenantRequest]:
    return TenantTraces(3).usual()


@pytest.fixture(scope="module")
def short(usual: list[TenantRequest]) -> list[TenantRequest]:
    """The beginning of a trace, with many strangers."""
    requests = sorted([*usual, *overheard(usual, 0.3, 1)], key=lambda one: one.at_s)
    return [one for one in requests if one.at_s < LATEST_S]


def test_common_texts_have_many_tenants_and_others_have_one(usual: list[TenantRequest]) -> None:
    tenants: dict[bytes, set[str]] = defaultdict(set)
    for one in usual:
        for page in one.pages:
            tenants[page].add(one.tenant)
    for one in usual:
        common = one.common // 16
        assert all(len(tenants[page]) >= FEWEST_READERS for page in one.pages[:common])
        assert all(tenants[page] == {one.tenant} for page in one.pages[common:])


@pytest.mark.parametrize("heavy", [False, True])
def test_a_burst_is_ten_times_what_its_tenant_sends(heavy: bool) -> None:
    traces = TenantTraces(3)
    usual = traces.usual()
    noise = traces.burst(usual, "tenant 5", heavy)
    begin, end = LENGTH_S / 3, LENGTH_S * 2 / 3
    during = [one for one in usual if one.tenant == "tenant 5" and begin <= one.at_s < end]
    assert len(noise) == 9 * len(during) > 0
    assert all(one.tenant == "tenant 5" and begin <= one.at_s < end for one in noise)
    known = {one.pages[one.common // 16] for one in usual}
    assert not known & {one.pages[one.common // 16] for one in noise}, "what is private is new"
    assert heavy == all(len(one.prompt) - one.common >= 512 for one in noise)


def test_what_is_private_is_shared_only_where_all_is(short: list[TenantRequest]) -> None:
    modes = {
        "separate": serve(short),
        "ours": serve(short, sharing(2, 5.0)),
        "shared": serve(short, one_tenant=True),
    }
    foreign = {name: sum(one.foreign for one in served) for name, served in modes.items()}
    assert foreign["ours"] == 0
    assert foreign["shared"] > 1000
    assert all(len(served) == len(short) for served in modes.values())
    common = {name: sum(one.common_hits for one in served) for name, served in modes.items()}
    assert common["separate"] < 0.8 * common["ours"] < 0.8 * common["shared"]
    assert min(one.ttft_s for one in modes["ours"]) > 0


def test_thresholds_and_epochs_delay_what_is_shared(short: list[TenantRequest]) -> None:
    hits = [
        sum(one.common_hits for one in serve(short, sharing(users, epoch_s)))
        for users, epoch_s in ((2, 5.0), (8, 5.0), (2, 1000.0))
    ]
    assert hits[0] > hits[1] > hits[2]
