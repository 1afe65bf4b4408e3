"""The table of transfer prices against the prices themselves, pair by pair; and what it makes of choices."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace

from router.index.global_index import GlobalIndex
from router.placement.fleet_table import FleetTable
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.transfer_rates import (
    Kind,
    TransferPrices,
    TransferRates,
    expected_backend,
    locality,
)
from router.placement.transfer_table import transfer_table
from router.placement_options import PolicyWeights
from tests.router.directory.test_directory import record
from tests.router.placement.test_policy import DEFAULTS, IndexedPlacer, ask, chosen, decode, placer, prefill
from wire.messages.rooms import Timeline
from wire.records import Role, WorkerRecord

OFFERS = [("shm", "tcp"), ("shm", "mooncake", "tcp"), ("tcp",), ()]


@st.composite
def workers(draw: st.DrawFn, role: Role, letter: str) -> list[WorkerRecord]:
    names = [f"{letter}{number}" for number in range(draw(st.integers(1, 7)))]
    return [
        record(
            name,
            role=role,
            host=f"boot{draw(st.integers(0, 2))}/net/{draw(st.integers(0, 1))}",
            rack=draw(st.sampled_from(["", "r1", "r2"])),
            transfer_backends=draw(st.sampled_from(OFFERS)),
        )
        for name in names
    ]


transfers = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.floats(1e-3, 10), st.integers(1, 12)), max_size=10
)


@given(workers(Role.PREFILL, "p"), workers(Role.DECODE, "d"), transfers, st.integers(0, 1000))
def test_the_table_has_the_price_of_every_pair(
    ours: list[WorkerRecord],
    theirs: list[WorkerRecord],
    seen: list[tuple[int, int, float, int]],
    seed: int,
) -> None:
    rates, weights = TransferRates(), PolicyWeights.model_validate({})
    rates.fleet([*ours, *theirs])
    rates.prefill_tokens_per_s = 1000.0
    for p, d, seconds, count in seen:
        one, other = ours[p % len(ours)], theirs[d % len(theirs)]
        backend = expected_backend(one.transfer_backends, other.transfer_backends, locality(one, other))
        for _ in range(count):
            rates.observe(one, other, backend, 1000, seconds)
    estimates = [WorkerLoadEstimate(one, 0.0) for one in [*ours, *theirs]]
    table = transfer_table(*FleetTable(estimates, GlobalIndex()).project(0.0), rates, weights)
    prices = rates.prices(weights)
    expected = np.array([[prices.of_pair(p, d) for d in theirs] for p in ours])
    for d in range(len(theirs)):
        assert table.prices_to(d) == pytest.approx(expected[:, d])
    random = np.random.default_rng(seed)
    costs, missing = random.integers(0, 50, len(ours)) * 1.0, random.integers(0, 500, len(theirs)) * 1.0
    assert table.cheapest(costs, missing) == pytest.approx((costs[:, None] + expected * missing).min(0))


def test_pairs_of_one_kind_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slow D all P have prices of their own, to each D. With 100 of both that took 50 ms, every
    second."""
    ours, theirs = (
        [record(f"{role}{n}", role=role, host=f"{role}{n}", transfer_backends=("tcp",)) for n in range(20)]
        for role in (Role.PREFILL, Role.DECODE)
    )
    rates, weights = TransferRates(), PolicyWeights.model_validate({})
    rates.fleet([*ours, *theirs])
    rates.prefill_tokens_per_s = 1000.0
    for one in ours:
        for _ in range(20):
            rates.observe(one, theirs[0], "tcp", 1000, 10.0)
            rates.observe(one, theirs[1], "tcp", 1000, 0.1)
    estimates = [WorkerLoadEstimate(one, 0.0) for one in [*ours, *theirs]]
    asked: list[Kind] = []
    of = TransferPrices.of
    monkeypatch.setattr(TransferPrices, "of", lambda prices, kind: (asked.append(kind), of(prices, kind))[1])
    table = transfer_table(*FleetTable(estimates, GlobalIndex()).project(0.0), rates, weights)
    assert len(table.apart) == 20
    assert len(asked) < 100


def fleet(queued_near: int = 0) -> list[WorkerRecord]:
    """Two racks with a P and a D each; the P of the first has this many tokens queued."""
    near = [prefill("p1", queued_near), decode("d1")]
    far = [prefill("p2"), decode("d2", requests=100)]
    racks = [replace(one, rack=rack) for rack, pair in (("r1", near), ("r2", far)) for one in pair]
    return [
        replace(
            one,
            mailbox=one.id,
            load=replace(one.load, prefill_tokens_per_s=1000.0),
            transfer_backends=("tcp",),
        )
        for one in racks
    ]


def learn(made: IndexedPlacer, prefill: str, decode: str, seconds: float) -> None:
    """64 transfers of 1,000 tokens."""
    nbytes = round(1000 * made.policy.transfers.bytes_per_token)
    for _ in range(64):
        made.transferred(decode, Timeline(1, 0, decode, [], nbytes, "tcp", prefill, seconds))


def test_a_pair_of_one_rack_is_preferred_while_its_p_is_not_loaded() -> None:
    made = placer("kv", fleet(queued_near=100), weights=DEFAULTS)
    assert chosen(made.choose(ask(60), 0.0)) == ("p2", "d1"), "the shorter queue: the network is fast"
    for p, d, seconds in (("p1", "d1", 0.01), ("p2", "d2", 0.01), ("p1", "d2", 2.0), ("p2", "d1", 2.0)):
        learn(made, p, d, seconds)
    assert chosen(made.choose(ask(60), 0.0)) == ("p2", "d1"), "not published yet"
    made.tick(0.0)
    made.tick(1.0)
    assert chosen(made.choose(ask(60), 0.0)) == ("p1", "d1"), "the network is slow"
    made.update(fleet(queued_near=10_000), 2.0)
    assert chosen(made.choose(ask(60), 2.0)) == ("p2", "d1"), "but not slower than the queue"


def test_what_strangers_are_said_to_have_sent_is_ignored() -> None:
    made = placer("kv", fleet(), weights=DEFAULTS)
    learn(made, "nobody", "d1", 1.0)
    learn(made, "p1", "nobody", 1.0)
    assert not made.policy.transfers.kinds
