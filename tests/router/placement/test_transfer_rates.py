"""What transfers cost, by where the two workers are: from priors to measurements."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.placement.transfer_rates import (
    OWN_PRICE,
    Kind,
    Locality,
    TransferRates,
    blended,
    expected_backend,
    locality,
    prior,
    scale,
)
from router.placement_options import PolicyWeights
from tests.router.directory.test_directory import record
from tests.support.fake_worker import group_layout
from wire.records import Role, WorkerLoad, WorkerRecord

WEIGHTS = PolicyWeights.model_validate({})
SPEED = 1000.0  # prompt tokens a second
BYTES = group_layout().page_bytes / group_layout().page_size  # of KV, per token

positive = st.floats(1e-6, 1e6)
counts = st.floats(0, 64)


def at(name: str, host: str, rack: str = "", role: Role = Role.PREFILL) -> WorkerRecord:
    load = WorkerLoad(prefill_tokens_per_s=SPEED) if role is Role.PREFILL else WorkerLoad()
    return record(name, host=host, rack=rack, role=role, load=load, transfer_backends=("shm", "tcp"))


P = at("p", "boot1/net:[1]/pid:[1]", "r1")
NEXT = at("d0", "boot1/net:[1]/pid:[1]", "r1", Role.DECODE)
BESIDE = at("d1", "boot1/net:[2]/pid:[2]", "r1", Role.DECODE)
RACK = at("d2", "boot2/net:[1]/pid:[1]", "r1", Role.DECODE)
FAR = at("d3", "boot3/net:[1]/pid:[1]", "", Role.DECODE)
EVERYONE = [P, NEXT, BESIDE, RACK, FAR]


def rates(*transfers: tuple[WorkerRecord, float, int]) -> TransferRates:
    """Rates that have seen, to each D, so many transfers of 100 tokens that each took so many seconds."""
    made = TransferRates()
    made.fleet(EVERYONE)
    for decode, seconds, count in transfers:
        backend = expected_backend(P.transfer_backends, decode.transfer_backends, locality(P, decode))
        for _ in range(count):
            made.observe(P, decode, backend, round(100 * BYTES), seconds)
    return made


def price(made: TransferRates, decode: WorkerRecord) -> float:
    return made.prices(WEIGHTS).of_pair(P, decode)


def test_a_locality_is_the_nearest_thing_that_two_workers_share() -> None:
    found = [locality(P, other) for other in (NEXT, BESIDE, RACK, FAR)]
    assert found == [Locality.HOST, Locality.MACHINE, Locality.RACK, Locality.FAR]
    assert locality(FAR, at("x", "boot4/n/p")) is Locality.FAR, "workers without a label share no rack"


def test_the_expected_backend_is_the_one_that_prefill_will_choose() -> None:
    both = ("shm", "mooncake", "tcp")
    assert expected_backend(both, both, Locality.HOST) == "shm"
    assert expected_backend(both, both, Locality.MACHINE) == "mooncake"
    assert expected_backend(("shm", "tcp"), both, Locality.RACK) == "tcp"
    assert expected_backend(("shm",), ("shm",), Locality.FAR) == ""


def test_before_any_transfer_and_before_any_speed_the_priors_hold() -> None:
    expected = [0.1 * share for share in (0.2, 0.4, 0.8, 1.0)]
    assert [price(rates(), one) for one in EVERYONE[1:]] == pytest.approx(expected)
    unknown = rates((NEXT, 1.0, 30))
    unknown.prefill_tokens_per_s = 0.0
    assert [price(unknown, one) for one in EVERYONE[1:]] == pytest.approx(expected)


def test_many_transfers_make_the_price_the_prompt_tokens_that_p_computes_meanwhile() -> None:
    slow = rates((FAR, 0.5, 2000))  # 100 tokens of KV in half a second, in which P computes 500
    assert price(slow, FAR) == pytest.approx(5.0, rel=0.1)


@given(positive, positive, counts)
def test_a_blend_is_between_the_prior_and_what_was_measured(one: float, other: float, count: float) -> None:
    found = blended(one, other, count)
    assert min(one, other) * (1 - 1e-9) <= found <= max(one, other) * (1 + 1e-9)
    more = blended(one, other, count + 1)
    assert abs(more - other) <= abs(found - other) + 1e-9 * other, "measurements win as they come"


@given(
    st.dictionaries(st.builds(Kind, st.sampled_from(Locality), st.just("tcp")), st.tuples(positive, counts))
)
def test_the_scale_is_between_the_ratios_of_the_kinds(measured: dict[Kind, tuple[float, float]]) -> None:
    ratios = [1.0, *(one / prior(WEIGHTS, kind.locality) for kind, (one, _) in measured.items())]
    assert min(ratios) * (1 - 1e-9) <= scale(measured, WEIGHTS) <= max(ratios) * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.sampled_from(EVERYONE[1:]), st.floats(1e-4, 100), st.integers(1, 20)), max_size=8)
)
def test_nearer_is_never_dearer(transfers: list[tuple[WorkerRecord, float, int]]) -> None:
    prices = rates(*transfers).prices(WEIGHTS)
    found = [prices.at(near, ("shm", "tcp"), ("shm", "tcp")) for near in Locality]
    assert found == sorted(found)
    assert found[0] > 0


@given(st.sampled_from(EVERYONE[1:]), st.floats(1e-4, 10), st.floats(1.01, 100))
def test_slower_transfers_are_dearer(decode: WorkerRecord, seconds: float, factor: float) -> None:
    assert price(rates((decode, seconds, 10)), decode) < price(rates((decode, seconds * factor, 10)), decode)


def test_a_kind_that_nobody_has_seen_is_dearer_by_the_priors_ratio() -> None:
    made = rates((NEXT, 0.2, 64))
    assert price(made, FAR) / price(made, RACK) == pytest.approx(1 / 0.8)
    assert price(made, FAR) > 2 * price(made, NEXT)


def test_a_pair_with_a_bad_link_gets_a_price_of_its_own() -> None:
    twin = at("d4", "boot5/n/p", "", Role.DECODE)
    made = rates((FAR, 0.01, 64))
    made.fleet([*EVERYONE, twin])
    made.observe(P, twin, "tcp", round(100 * BYTES), 5.0)
    assert (P.id, twin.id) not in made.prices(WEIGHTS).pairs, "one transfer shows little"
    for _ in range(12):
        for _ in range(8):
            made.observe(P, FAR, "tcp", round(100 * BYTES), 0.01)
        made.observe(P, twin, "tcp", round(100 * BYTES), 5.0)
    assert price(made, twin) > OWN_PRICE * price(made, FAR)


def test_a_kind_that_was_slow_once_is_tried_again() -> None:
    made = rates((FAR, 10.0, 64))
    usual = price(rates(), FAR)
    made.tick(0.0)
    assert price(made, FAR) > 100 * usual
    made.tick(3600.0)
    assert price(made, FAR) < 2 * usual
    made.tick(20_000.0)
    assert price(made, FAR) == usual
    assert not made.pairs


def test_prices_are_published_at_most_once_a_second() -> None:
    made = rates((FAR, 1.0, 1))
    versions = []
    for now in (0.0, 0.5, 1.0, 1.5, 2.0):
        made.tick(now)
        versions.append(made.version)
    assert versions == [0, 0, 1, 1, 2]


def test_a_transfer_of_nothing_or_in_no_time_is_none() -> None:
    made = rates()
    made.observe(P, FAR, "tcp", 0, 1.0)
    made.observe(P, FAR, "tcp", 100, 0.0)
    assert not made.kinds


def test_transfers_that_are_not_priced_cost_nothing() -> None:
    free = rates((FAR, 1.0, 64)).prices(PolicyWeights.model_validate({"transfer": 0.0}))
    assert [free.of_pair(P, one) for one in EVERYONE[1:]] == [0.0] * 4
