"""Turns between tenants: who is next, what it costs, what is remembered."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.placement import fair_queue
from router.placement.fair_queue import INPUT_WEIGHT, OUTPUT_WEIGHT, FairQueue

NEVER = math.inf


def push_all(queue: FairQueue, tenant: str, rooms: range, tokens: int = 10) -> None:
    for room in rooms:
        queue.push(room, tenant, 0, tokens, NEVER)


def turns(queue: FairQueue, count: int) -> list[str]:
    return [queue.pop().tenant for _ in range(count)]


def test_one_behind_a_thousand_waits_for_one_turn() -> None:
    queue = FairQueue({})
    push_all(queue, "a", range(1000))
    assert turns(queue, 300) == ["a"] * 300
    queue.push(2000, "b", 0, 10, NEVER)
    assert turns(queue, 2) == ["a", "b"]


def test_a_newcomer_waits_for_one_turn_of_each_at_most() -> None:
    queue = FairQueue({})
    for i, tenant in enumerate("abcde"):
        push_all(queue, tenant, range(100 * i, 100 * i + 50), tokens=10 + i)
    turns(queue, 100)
    push_all(queue, "late", range(1000, 1050))
    served = turns(queue, 6)
    assert "late" in served
    assert len(set(served)) == len(served)


def test_newcomers_keep_nobody_waiting_who_waited_before_them() -> None:
    queue = FairQueue({})
    push_all(queue, "returns", range(1))
    turns(queue, 1)
    push_all(queue, "a", range(10, 11))
    push_all(queue, "b", range(20, 21))
    push_all(queue, "returns", range(1, 2))
    served = []
    for room in range(100, 110):
        push_all(queue, f"new {room}", range(room, room + 1))  # one per turn: the queue never gets shorter
        served += turns(queue, 1)
    assert served[:4] == ["a", "b", "returns", "new 100"]


def test_newcomers_pass_a_tenant_that_had_more_until_they_had_as_much() -> None:
    queue = FairQueue({})
    push_all(queue, "new", range(2))
    push_all(queue, "old", range(2, 4))
    assert turns(queue, 2) == ["new", "old"]
    queue.charge("old", 0, 50)  # ten prompts of the newcomers
    served = []
    for room in range(100, 150):
        push_all(queue, f"new {room}", range(room, room + 1))
        served += turns(queue, 1)
    assert served.index("old") <= 12, "when the others have had as much"


def test_weights_are_shares() -> None:
    queue = FairQueue({"a": 3.0})
    push_all(queue, "a", range(100))
    push_all(queue, "b", range(100, 200))
    served = turns(queue, 80)
    assert served.count("a") == 60


def test_output_is_charged_as_it_comes() -> None:
    queue = FairQueue({})
    push_all(queue, "a", range(100))
    push_all(queue, "b", range(100, 200))
    assert sorted(turns(queue, 2)) == ["a", "b"]
    queue.charge("a", 0, 20)  # four of b's prompts, and b began one behind a
    assert turns(queue, 4) == ["b"] * 3 + ["a"]


def test_idle_time_is_no_credit() -> None:
    queue = FairQueue({})
    push_all(queue, "a", range(100))
    push_all(queue, "b", range(100, 101))
    turns(queue, 50)
    push_all(queue, "b", range(200, 300))
    assert abs(turns(queue, 40).count("a") - 20) <= 1


def test_within_a_tenant_by_priority_then_first_come() -> None:
    queue = FairQueue({})
    for room, priority in ((1, 0), (2, 5), (3, 0), (4, 5)):
        queue.push(room, "a", priority, 10, NEVER)
    assert [queue.pop().room for _ in range(4)] == [2, 4, 1, 3]


def test_what_is_ahead_of_a_newcomer() -> None:
    queue = FairQueue({})
    assert queue.ahead("a", 0) == (0, 0)
    push_all(queue, "a", range(10), tokens=100)
    assert queue.ahead("a", 0) == (10, 1000)
    assert queue.ahead("a", 1) == (0, 0)
    assert queue.ahead("b", 0).tokens <= 100  # its turn is next but one at most
    push_all(queue, "b", range(10, 14), tokens=100)
    assert queue.ahead("b", 0) == (9, 900)
    assert queue.ahead("a", 0) == (14, 1400)


def test_those_who_began_at_the_same_counter_are_ahead_of_a_newcomer() -> None:
    queue = FairQueue({"heavy": 4.0})
    push_all(queue, "a", range(1), tokens=100)
    for room in range(1, 6):
        push_all(queue, f"t{room}", range(room, room + 1), tokens=30)
    push_all(queue, "heavy", range(6, 9), tokens=80)
    assert queue.ahead("late", 0) == (7, 100 + 5 * 30 + 80)
    push_all(queue, "late", range(10, 12), tokens=100)
    assert turns(queue, 8)[-1] == "late"


def test_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MOST_IDLE", 50)
    queue = FairQueue({})
    for room in range(1_000):
        queue.push(room, f"t{room}", 0, 10, NEVER)
        queue.pop()
        if room >= 5:
            queue.over(f"t{room - 5}")
            assert queue.tenants <= 6
    for room in range(995, 1_000):
        queue.over(f"t{room}")
    assert queue.tenants == 0
    push_all(queue, "stays", range(2_000, 2_002))
    for room in range(3_000, 3_300):
        queue.push(room, f"t{room}", 0, 10, NEVER)
    while len(queue):
        tenant = queue.pop().tenant
        queue.charge(tenant, 0, 1_000)  # each is ahead of the others when it goes
        queue.over(tenant)
        assert queue.tenants <= len(queue) + 50
    assert queue.tenants == 0


def test_a_debt_outlives_an_idle_moment() -> None:
    queue = FairQueue({})
    push_all(queue, "b", range(100))
    push_all(queue, "a", range(100, 101))
    turns(queue, 3)
    queue.charge("a", 0, 100)
    queue.over("a")
    push_all(queue, "a", range(200, 201))
    assert turns(queue, 15) == ["b"] * 15


OUTPUT = 30  # tokens of a room, at most
LONGEST = 100  # of a prompt
RUNNING = 6
WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0]), max_size=4)


class Fairness(RuleBasedStateMachine):
    """Random work. The service of each tenant is counted here too, from the rooms' own figures."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 0
        self.waiting: dict[int, str] = {}
        self.running: dict[int, list[int | str]] = {}  # room -> [tenant, output left]
        self.service: dict[str, float] = defaultdict(float)
        self.both_since: dict[tuple[str, str], float] = {}  # service difference when both began to wait

        self.weights: dict[str, float] = {}
        self.queue = FairQueue({})

    @initialize(weights=WEIGHTS)
    def start(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.queue = FairQueue(weights)

    def served(self, tenant: str, tokens: float) -> None:
        self.service[tenant] += tokens / self.weights.get(tenant, 1.0)

    @rule(tenant=st.sampled_from("abcd"), tokens=st.integers(1, LONGEST), priority=st.integers(0, 2))
    def push(self, tenant: str, tokens: int, priority: int) -> None:
        self.room += 1
        self.queue.push(self.room, tenant, priority, tokens, NEVER)
        self.waiting[self.room] = tenant

    @precondition(lambda self: self.waiting and len(self.running) < RUNNING)
    @rule(output=st.integers(0, OUTPUT), cached=st.floats(0, 0.99))
    def pop(self, output: int, cached: float) -> None:
        head = self.queue.head()
        assert head is not None
        taken = self.queue.pop()
        assert taken is head
        assert self.waiting.pop(taken.room) == taken.tenant
        self.running[taken.room] = [taken.tenant, output]
        saved = int(taken.tokens * cached)
        self.queue.charge(taken.tenant, -saved, 0)
        self.served(taken.tenant, INPUT_WEIGHT * (taken.tokens - saved))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def produce(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted(self.running)))
        tenant, left = self.running[room]
        assert isinstance(tenant, str)
        assert isinstance(left, int)
        made = data.draw(st.integers(0, left))
        self.queue.charge(tenant, 0, made)
        self.served(tenant, OUTPUT_WEIGHT * made)
        self.running[room] = [tenant, left - made]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted(self.running)))
        tenant, _ = self.running.pop(room)
        self.queue.over(str(tenant))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[room]
        self.queue.remove(room)
        assert room not in self.queue

    @invariant()
    def nobody_is_lost(self) -> None:
        assert {one.room for one in self.queue} == set(self.waiting)
        assert len(self.queue) == len(self.waiting)
        busy = {*self.waiting.values(), *(str(tenant) for tenant, _ in self.running.values())}
        # Private: which tenants are remembered shows nowhere else.
        assert busy <= self.queue._tenants.keys()
        if not busy:
            assert self.queue.tenants == 0
        assert self.queue.tokens == sum(one.tokens for one in self.queue)

    @invariant()
    def those_that_wait_are_served_alike(self) -> None:
        """While both wait, two tenants' service differs by what one turn and running rooms may add."""
        waiting = set(self.waiting.values())
        bound = 2 * (INPUT_WEIGHT * LONGEST + OUTPUT_WEIGHT * OUTPUT * RUNNING) / 0.5
        for one in "abcd":
            for other in "abcd":
                if one >= other:
                    continue
                if not {one, other} <= waiting:
                    self.both_since.pop((one, other), None)
                    continue
                apart = self.service[one] - self.service[other]
                since = self.both_since.setdefault((one, other), apart)
                assert abs(apart - since) <= bound


def test_fairness_and_conservation() -> None:
    run_state_machine_as_test(Fairness, settings=settings(max_examples=60, stateful_step_count=50))


@pytest.mark.invariants
def test_fairness_and_conservation_for_long() -> None:
    run_state_machine_as_test(Fairness, settings=settings(max_examples=400, stateful_step_count=100))
