"""Policy `kv` against its formula, priced worker by worker and pair by pair, in any fleet."""

from __future__ import annotations

import random
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from router.index.global_index import Matches, as_hashes
from router.placement.fleet_table import WorkerArrays
from router.placement.kv_policy import KVPolicy
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.policy import PlacementRequest, RoleCandidates
from router.placement_options import PolicyWeights
from tests.router.directory.test_directory import record

SPARE_SLOTS = 2  # of workers that are draining


class Worker(NamedTuple):
    """One worker as the formula sees it. `pages`: [4], as in Matches.found."""

    queued: float
    requests: int
    context: int
    spare: int
    host: int
    pages: tuple[int, ...]


class Fleet(NamedTuple):
    """Workers of both roles, the prompt, and the row of the session's last request in each role."""

    prefill: list[Worker]
    decode: list[Worker]
    prompt: int
    page_tokens: int
    last_prefill: int | None
    last_decode: int | None
    slots: list[int]  # of prefill, then of decode

    def candidates(self) -> tuple[RoleCandidates, RoleCandidates]:
        workers, split = self.prefill + self.decode, len(self.prefill)
        found = np.zeros((4, len(workers) + SPARE_SLOTS), np.int32)
        found[:, self.slots] = np.array([one.pages for one in workers]).T
        columns = [np.array(column, np.float64) for column in list(zip(*workers, strict=True))[:4]]
        slots = np.array(self.slots)
        estimates = [
            WorkerLoadEstimate(record(f"w{slot}", host=f"h{one.host}"), 0.0)
            for slot, one in zip(self.slots, workers, strict=True)
        ]

        def role(part: slice, last: int | None) -> RoleCandidates:
            names = [f"w{slot}" for slot in self.slots[part]]
            arrays = WorkerArrays(estimates[part], names, slots[part], *(column[part] for column in columns))
            return RoleCandidates(arrays, Matches(found), self.page_tokens, last)

        return role(slice(split), self.last_prefill), role(slice(split, None), self.last_decode)


few = st.integers(0, 3)  # so that many cost the same
tokens = st.one_of(few.map(lambda n: n * 500), st.integers(0, 5000))
queues = st.one_of(tokens, st.floats(0, 5000))
pages = st.tuples(*[st.integers(0, 3)] * 4).map(lambda tiers: (sum(tiers), *tiers[1:]))
workers = st.builds(Worker, queues, few, tokens, tokens, few, pages)
weights = st.builds(
    lambda **said: PolicyWeights.model_validate(said),
    prefill_queue=st.sampled_from([1.0, 2.0]),
    same_host=st.sampled_from([0.0, 0.2, 1.0]),
    same_machine=st.just(1.0),  # no two workers are that near, nor that
    same_rack=st.just(1.0),
    prefill_left=st.sampled_from([1.0, 4.0]),
    transfer=st.sampled_from([0.0, 0.1, 3.0]),
    queue_objective=st.sampled_from([64.0, 65_536.0]),
    expected_credit=st.floats(0, 1),
    session=st.sampled_from([0.0, 64.0]),
    decode_relief=st.sampled_from([0.0, 400.0, 16_384.0]),
)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    prefill = draw(st.lists(workers, max_size=6))
    decode = draw(st.lists(workers, min_size=1, max_size=8))
    count = len(prefill) + len(decode)
    slots = draw(st.permutations(range(count + SPARE_SLOTS)))[:count]
    last_prefill = draw(st.none() | st.integers(0, len(prefill) - 1)) if prefill else None
    last_decode = draw(st.none() | st.integers(0, len(decode) - 1))
    page_tokens = draw(st.sampled_from([0, 1, 16]))
    held = page_tokens * max(one.pages[0] for one in prefill + decode)
    prompt = max(1, held + draw(st.integers(0, 20) | st.integers(0, 3000)))
    return Fleet(prefill, decode, prompt, page_tokens, last_prefill, last_decode, slots)


class Formula:
    """The formula of kv_policy.py, written out for one worker and one pair at a time."""

    def __init__(self, weights: PolicyWeights, alone_tokens: int, output: float, fleet: Fleet):
        self.w, self.alone_tokens, self.output = weights, alone_tokens, output
        self.fleet, self.prompt = fleet, fleet.prompt
        self.shortest = min((one.queued for one in fleet.prefill), default=0.0)

    def left(self, worker: Worker) -> float:
        all_tiers, host, storage, expected = worker.pages
        device = all_tiers - host - storage - expected
        w = self.w
        saved = device + host * w.host_credit + storage * w.storage_credit + expected * w.expected_credit
        return max(1.0, self.prompt - saved * self.fleet.page_tokens)

    def prefill(self, row: int) -> float:
        worker, w = self.fleet.prefill[row], self.w
        queue = worker.queued + (worker.queued - self.shortest) ** 2 / w.queue_objective
        session = w.session if row == self.fleet.last_prefill else 0.0
        return w.prefill_queue * queue + w.prefill_left * self.left(worker) - session

    def load(self, row: int) -> float:
        worker, w = self.fleet.decode[row], self.w
        lacking = max(0.0, self.prompt + self.output - worker.spare)
        session = w.session if row == self.fleet.last_decode else 0.0
        load = w.decode_load * worker.requests + w.decode_context * worker.context
        return load + w.decode_full * lacking - session

    def price(self, p: int, d: int) -> float:
        near = self.fleet.prefill[p].host == self.fleet.decode[d].host
        return self.w.transfer * (self.w.same_host if near else 1.0)

    def move(self, p: int, d: int) -> float:
        held = self.fleet.decode[d].pages[0] * self.fleet.page_tokens
        return self.price(p, d) * (self.prompt - held)

    def nearest_move(self, d: int) -> float:
        return min(self.move(p, d) for p in range(len(self.fleet.prefill)))

    def pair(self, p: int, d: int) -> float:
        return self.prefill(p) + self.load(d) + self.move(p, d)

    def alone(self, row: int) -> float | None:
        worker, w = self.fleet.decode[row], self.w
        relieved = not self.fleet.prefill or self.shortest > w.decode_relief
        if not relieved and self.left(worker) > self.alone_tokens:
            return None
        return self.load(row) + w.prefill_queue * worker.queued + w.decode_prefill * self.left(worker)

    def all(self) -> dict[tuple[int | None, int], float]:
        rows = range(len(self.fleet.decode))
        costs: dict[tuple[int | None, int], float] = {
            (p, d): self.pair(p, d) for p in range(len(self.fleet.prefill)) for d in rows
        }
        return costs | {(None, d): cost for d in rows if (cost := self.alone(d)) is not None}


cases = (fleets(), weights, st.sampled_from([0, 16, 100, 5000]), st.floats(0, 500), few)


@settings(max_examples=150)
@given(*cases)
def test_the_choice_costs_least(
    fleet: Fleet, weighed: PolicyWeights, alone: int, output: float, seed: int
) -> None:
    policy = KVPolicy(weighed, alone, random.Random(seed))
    choice = policy.choose(PlacementRequest(fleet.prompt, as_hashes([]), output), *fleet.candidates())
    costs = Formula(weighed, alone, output, fleet).all()
    chosen, least = costs[choice.prefill_row, choice.decode_row], min(costs.values())
    assert chosen == pytest.approx(least, rel=1e-9, abs=1e-6)
    if choice.prefill_row is not None:  # alone wins where it costs no more
        alones = [cost for (p, _), cost in costs.items() if p is None]
        assert min(alones, default=np.inf) > chosen - 1e-6


@settings(max_examples=100)
@given(*cases)
def test_the_costs_that_are_shown_are_the_formulas(
    fleet: Fleet, weighed: PolicyWeights, alone: int, output: float, seed: int
) -> None:
    policy = KVPolicy(weighed, alone, random.Random(seed))
    choice = policy.choose(PlacementRequest(fleet.prompt, as_hashes([]), output), *fleet.candidates())
    shown, formula = policy.costs(choice), Formula(weighed, alone, output, fleet)
    rows = range(len(fleet.decode))
    alones = [formula.alone(d) for d in rows]
    assert ("prefill" in shown) == ("decode" in shown) == bool(fleet.prefill)
    if fleet.prefill:
        assert shown["prefill"] == pytest.approx([formula.prefill(p) for p in range(len(fleet.prefill))])
        assert shown["decode"] == pytest.approx([formula.load(d) + formula.nearest_move(d) for d in rows])
    assert ("alone" in shown) == any(cost is not None for cost in alones)
    if "alone" in shown:
        assert shown["alone"] == pytest.approx([np.inf if cost is None else cost for cost in alones])


def test_equal_workers_take_turns_wherever_they_are_in_the_arrays() -> None:
    """No rounding may depend on a worker's row."""
    one = Worker(333.3, 3, 1777, 1234, 0, (7, 1, 2, 3))
    for count in (2, 3, 5, 9, 33):
        workers = [one._replace(host=host) for host in range(count)]
        fleet = Fleet(workers, workers, 1999, 16, None, None, list(range(2 * count)))
        policy = KVPolicy(PolicyWeights.model_validate({}), 0, random.Random(1))
        request = PlacementRequest(fleet.prompt, as_hashes([]), 321.5)
        choices = [policy.choose(request, *fleet.candidates()) for _ in range(20 * count)]
        assert {choice.prefill_row for choice in choices} == set(range(count))
        assert {choice.decode_row for choice in choices} == set(range(count))
