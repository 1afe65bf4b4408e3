"""Policy `kv` in C++ against its reference in numpy: the same workers by the same chance, in any fleet."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from router.index.global_index import Matches, as_hashes
from router.options import PolicyWeights
from router.placement.fleet_table import Floats, WorkerArrays
from router.placement.kv_policy import KVPolicy
from router.placement.policy import PlacementRequest, RoleCandidates

SPARE_SLOTS = 2  # of workers that are draining
few = st.integers(0, 3)  # so that many cost the same
tokens = st.one_of(few.map(lambda n: n * 500), st.integers(0, 5000))
# queued, requests, context, capacity; host; pages held, and of those in each slower tier
workers = st.tuples(
    st.one_of(tokens, st.floats(0, 5000)), few, tokens, tokens, few, st.tuples(*[st.integers(0, 8)] * 4)
)
weights = st.builds(
    lambda **said: PolicyWeights.model_validate(said),
    same_host=st.sampled_from([0.0, 0.2, 1.0]),
    prefill_left=st.sampled_from([1.0, 4.0]),
    transfer=st.sampled_from([0.0, 0.1, 3.0]),
    queue_objective=st.sampled_from([64.0, 65_536.0]),
    expected_credit=st.floats(0, 1),
    session=st.sampled_from([0.0, 64.0]),
)


@st.composite
def sides(draw: st.DrawFn) -> tuple[RoleCandidates, RoleCandidates]:
    """Prefill and decode, of a fleet whose slots are in any order."""
    split, fleet = draw(st.integers(0, 6)), draw(st.lists(workers, min_size=1, max_size=14))
    split = min(split, len(fleet) - 1)
    slots = np.array(draw(st.permutations(range(len(fleet) + SPARE_SLOTS)))[: len(fleet)], np.int64)
    found = np.zeros((4, len(fleet) + SPARE_SLOTS), np.int32)
    found[:, slots] = np.array([one[5] for one in fleet]).T
    figures: Floats = np.array([one[:4] for one in fleet], np.float64).T.copy()
    hosts = np.array([one[4] for one in fleet], np.int64)
    names, matches, page = [f"w{slot}" for slot in slots], Matches(found), draw(st.sampled_from([0, 1, 16]))

    def side(part: slice) -> RoleCandidates:
        rows = WorkerArrays([], names[part], slots[part], hosts[part], figures[:, part])
        last = draw(st.none() | st.integers(0, len(rows) - 1)) if len(rows) else None
        return RoleCandidates(rows, matches, page, last)

    return side(slice(split)), side(slice(split, None))


def both(
    policy: KVPolicy, ask: PlacementRequest, prefill: RoleCandidates, decode: RoleCandidates
) -> list[tuple[int | None, int, object]]:
    """What each picks from the same state of chance, and the state it leaves."""
    before, told = policy.chance.getstate(), list[tuple[int | None, int, object]]()
    for choose in (policy.choose, policy._choose):
        policy.chance.setstate(before)
        choice = choose(ask, prefill, decode)
        told.append((choice.prefill_row, choice.decode_row, policy.chance.getstate()))
    return told


@settings(deadline=None, max_examples=400)
@given(sides(), weights, st.sampled_from([0, 16, 100, 5000]), st.integers(1, 3000), st.floats(0, 500), few)
def test_both_pick_the_same_by_the_same_chance(
    fleet: tuple[RoleCandidates, RoleCandidates],
    weighed: PolicyWeights,
    alone: int,
    prompt: int,
    output: float,
    seed: int,
) -> None:
    policy = KVPolicy(weighed, alone, random.Random(seed))
    assert policy._compiled is not None
    compiled, reference = both(policy, PlacementRequest(prompt, as_hashes([]), output), *fleet)
    assert compiled == reference


def one_each() -> tuple[RoleCandidates, RoleCandidates]:
    def side(row: int) -> RoleCandidates:
        here = WorkerArrays([], [f"w{row}"], np.array([row]), np.array([row]), np.zeros((4, 1)))
        return RoleCandidates(here, Matches(np.zeros((4, 2), np.int32)), 16)

    return side(0), side(1)


def test_with_a_temperature_or_without_a_compiler_numpy_picks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm = PolicyWeights.model_validate({"temperature": 1.0})
    assert KVPolicy(warm, 0, random.Random(1))._compiled is None
    monkeypatch.setattr("router.placement.kv_policy.native", lambda: None)
    policy = KVPolicy(PolicyWeights.model_validate({}), 0, random.Random(1))
    assert policy._compiled is None
    choice = policy.choose(PlacementRequest(100, as_hashes([]), 1.0), *one_each())
    assert (choice.prefill_row, choice.decode_row) == (0, 0)


@pytest.mark.parametrize(
    ("at", "wrong", "rule"),
    [
        (3, np.zeros((3, 2), np.int32), "found is int32"),
        (3, np.zeros((4, 1), np.int32), "no slot or host"),
        (4, np.zeros((3, 1)), "figures are float64"),
        (8, np.zeros((4, 1), np.float32), "figures are float64"),
        (5, np.zeros(2, np.int64), "one of each worker"),
        (9, np.array([-1]), "no slot or host"),
        (10, np.array([-1]), "no slot or host"),
        (7, 1, "no row"),
    ],
)
def test_what_does_not_fit_together_is_refused(at: int, wrong: object, rule: str) -> None:
    policy = KVPolicy(PolicyWeights.model_validate({}), 0, random.Random(1))
    assert policy._compiled is not None
    prefill, decode = one_each()
    p, d = prefill.workers, decode.workers
    arguments: list[object] = [
        100, 1.0, 16, decode.matches.found,
        p.figures, p.slots, p.hosts, None, d.figures, d.slots, d.hosts, None, max,
    ]  # fmt: skip
    arguments[at] = wrong
    with pytest.raises(ValueError, match=rule):
        policy._compiled.pick(*arguments)  # type: ignore[arg-type]


def test_a_draw_that_fails_fails_the_pick() -> None:
    policy = KVPolicy(PolicyWeights.model_validate({}), 0, random.Random(1))
    prefill, decode = one_each()
    twice = WorkerArrays([], ["a", "b"], np.array([0, 1]), np.array([3, 4]), np.zeros((4, 2)))

    def draw(equals: int) -> int:
        raise LookupError(f"{equals} equals")

    policy.chance.randrange = draw  # type: ignore[assignment,method-assign]
    with pytest.raises(LookupError, match="2 equals"):
        policy.choose(
            PlacementRequest(100, as_hashes([]), 1.0), prefill, RoleCandidates(twice, decode.matches, 16)
        )
