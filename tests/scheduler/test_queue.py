"""The order of the waiting queue: within a tenant, and between tenants."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

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

from scheduler.queue import WaitingQueue, _Line
from scheduler.req import Req
from tests.scheduler.rig import Rig

LONGEST = 12


@pytest.fixture
def rig() -> Iterator[Rig]:
    started = Rig()
    yield started
    started.close()


def waiting(rig: Rig, tenant: str, tokens: int = 3, resumed: bool = False, **fields: int) -> Req:
    """A request that is ready to be pushed."""
    req = rig.req(range(tokens), tenant=tenant, **fields)
    req.resumed = resumed
    req.aim_prefill()
    return req


def push(rig: Rig, queue: WaitingQueue, tenant: str, *sizes: int) -> list[Req]:
    reqs = [waiting(rig, tenant, tokens) for tokens in sizes]
    for req in reqs:
        queue.push(req)
    return reqs


def tenants(queue: WaitingQueue) -> str:
    """All turns from now on."""
    return "".join(queue.pop().tenant for _ in range(len(queue)))


def test_resumed_then_priority_then_first_come(rig: Rig) -> None:
    rng, queue = random.Random(3), WaitingQueue()
    reqs = [rig.req([1, 2, 3], priority=rng.randint(0, 2), arrived_ns=rng.randint(1, 30)) for _ in range(40)]
    for req in reqs:
        req.resumed = rng.random() < 0.2
    for req in rng.sample(reqs, len(reqs)):
        req.aim_prefill()
        queue.push(req)
    for req in reqs[::7]:
        queue.remove(req)
        reqs.remove(req)
    assert len(queue) == len(reqs)
    assert queue.tokens() == 3 * len(reqs)
    expected = sorted(
        reqs, key=lambda req: (not req.resumed, -req.priority, req.request.arrived_ns, req.room)
    )
    assert [queue.place(req) for req in expected] == list(range(len(reqs)))
    assert queue.head is expected[0]
    assert [queue.pop() for _ in reqs] == expected
    assert queue.head is None


def test_a_crowd_of_one_tenant_passes_another_once(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "a", *[5] * 100)
    for _ in range(10):
        queue.pop()
    (mine,) = push(rig, queue, "b", 50)
    assert queue.place(mine) == 1
    assert [queue.pop().tenant for _ in range(3)] == ["a", "b", "a"]


def test_turns_are_counted_in_tokens(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "a", *[6] * 20)
    push(rig, queue, "b", *[2] * 60)
    tokens = Counter({"b": 6})  # it begins where a's first turn ends
    for _ in range(60):
        req = queue.pop()
        tokens[req.tenant] += req.prefill_len
        assert abs(tokens["a"] - tokens["b"]) <= 6
    assert tokens["a"] + tokens["b"] >= 180


def test_what_was_cached_costs_nothing(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "a", *[10] * 9)
    push(rig, queue, "b", *[10] * 9)
    turns: Counter[str] = Counter()
    while turns["a"] < 9:
        head = queue.head
        assert head is not None
        head.cache_protected_len = 8 if head.tenant == "a" else 0
        turns[queue.pop().tenant] += 1
        head.cache_protected_len = 0
    assert turns == {"a": 9, "b": 1}, "nine turns of two tokens each are not two of b's"


def test_priority_and_arrival_count_within_a_tenant_only(rig: Rig) -> None:
    queue = WaitingQueue()
    reqs = [
        waiting(rig, "a", arrived_ns=9),
        waiting(rig, "b", arrived_ns=5, priority=7),
        waiting(rig, "b", arrived_ns=1),
        waiting(rig, "b", arrived_ns=2, priority=9),
    ]
    for req in reqs:
        queue.push(req)
    assert [queue.pop() for _ in reqs] == [reqs[0], reqs[3], reqs[1], reqs[2]]


def test_who_has_run_comes_first_whoever_it_is_and_is_not_charged_again(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "a", 3, 3)
    push(rig, queue, "b", 3)
    again = [waiting(rig, "b", 9, resumed=True), waiting(rig, "b", 9, resumed=True, priority=1)]
    for req in again:
        queue.push(req)
    assert [queue.pop(), queue.pop()] == again[::-1]
    assert tenants(queue) == "aba"


def test_a_tenant_that_comes_and_goes_gains_nothing(rig: Rig) -> None:
    """One request at a time, each as large as ten of the other tenant's."""
    queue, turns = WaitingQueue(), Counter[str]()
    push(rig, queue, "steady", *[4] * 100)
    push(rig, queue, "guest", 40)
    for _ in range(66):
        req = queue.pop()
        turns[req.tenant] += req.prefill_len
        if req.tenant == "guest":
            push(rig, queue, "guest", 40)
    assert abs(turns["steady"] - turns["guest"]) <= 44


def test_a_stream_of_new_tenants_keeps_nobody_waiting_for_ever(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "new", 10, 10)
    push(rig, queue, "old", 100, 1)
    assert [queue.pop().tenant for _ in range(2)] == ["new", "old"]  # old is 100 tokens ahead of new
    turns = []
    for number in range(50):
        push(rig, queue, f"new {number}", 10)
        turns.append(queue.pop().tenant)
    assert turns.index("old") == 10, "when the others have had as much"


def test_all_may_ask_for_their_places_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of rooms is asked for its place every few seconds."""
    queue, computed, turns = WaitingQueue(), Counter[int](), _Line.turns
    monkeypatch.setattr(_Line, "turns", lambda line, *most: computed.update([id(line)]) or turns(line, *most))
    reqs = [*push(rig, queue, "a", *[2] * 40), *push(rig, queue, "b", 3, *[2] * 39)]
    assert sorted(map(queue.place, reqs)) == list(range(80))
    assert list(computed.values()) == [1, 1]
    queue.pop()
    queue.remove(reqs[60])
    assert sorted(map(queue.place, [*reqs[1:60], *reqs[61:]])) == list(range(78))
    assert list(computed.values()) == [2, 2]


def test_a_router_whose_clock_is_ahead_waits_its_turn_only(rig: Rig) -> None:
    queue, now = WaitingQueue(), time.time_ns()
    ahead = waiting(rig, "a", arrived_ns=now + 3600 * 10**9)
    time.sleep(0.001)
    later = [waiting(rig, "a", arrived_ns=time.time_ns()) for _ in range(3)]
    for req in (*later, ahead):
        queue.push(req)
    assert queue.head is ahead


def test_nothing_is_remembered_when_nobody_waits(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "a", 100)
    queue.pop()
    push(rig, queue, "b", 1, 1)
    push(rig, queue, "a", 1)
    assert tenants(queue) == "bab"


def test_tenants_that_do_not_wait_are_forgotten_once_others_had_as_much(rig: Rig) -> None:
    queue = WaitingQueue()
    push(rig, queue, "steady", *[4] * 100)
    for number in range(50):
        (guest,) = push(rig, queue, f"guest {number}", 4)
        while queue.pop() is not guest:
            pass
        # Private: which tenants are remembered shows nowhere else.
        assert len(queue._idle) <= 2


class QueueMachine(RuleBasedStateMachine):
    """Tenants push, take their turns and give up, a few of the requests cached in part."""

    @initialize()
    def build(self) -> None:
        self.rig, self.queue = Rig(), WaitingQueue()
        self.waiting: list[Req] = []
        self.next: Req | None = None  # the head, as it was last seen
        # By tenant: the turns of others since it began to wait, or had its turn.
        self.passed: dict[str, Counter[str]] = {}

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()

    def mine(self, tenant: str) -> list[Req]:
        return [req for req in self.waiting if req.tenant == tenant and not req.resumed]

    @rule(
        tenant=st.sampled_from("abcd"),
        tokens=st.integers(1, LONGEST),
        priority=st.integers(0, 1),
        resumed=st.integers(0, 9),
    )
    def push(self, tenant: str, tokens: int, priority: int, resumed: int) -> None:
        req = waiting(self.rig, tenant, tokens, resumed == 0, priority=priority)
        if not req.resumed and not self.mine(tenant):
            self.passed[tenant] = Counter()
        self.waiting.append(req)
        self.queue.push(req)
        if self.next is not None and self.queue.head is not self.next:
            passes = tenant == self.next.tenant and req.rank < self.next.rank
            assert req.resumed or passes, "a request of another tenant passes the next one"
        self.next = self.queue.head

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        first = self.queue.head
        assert first is not None
        places = {req.room: self.queue.place(req) for req in self.waiting}
        assert places[first.room] == 0
        assert self.queue.pop() is first
        self.waiting.remove(first)
        self.next = self.queue.head
        if first.resumed:
            return
        assert not any(req.resumed for req in self.waiting)
        assert all(first.rank < req.rank for req in self.mine(first.tenant)), "not the tenant's first"
        for tenant, passed in self.passed.items():
            if tenant != first.tenant and self.mine(tenant):
                passed[first.tenant] += 1
        self.passed[first.tenant] = Counter()

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def give_up(self, index: int) -> None:
        req = self.waiting.pop(index % len(self.waiting))
        self.queue.remove(req)
        assert self.next is req or self.queue.head is self.next
        self.next = self.queue.head

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.waiting)
            assert self.queue.tokens() == sum(req.prefill_len for req in self.waiting)
            assert all(self.queue.place(req) < len(self.waiting) for req in self.waiting)

    @invariant()
    def nobody_is_passed_for_long(self) -> None:
        """Between two turns of a tenant that waits, another gets turns for at most two long requests."""
        for tenant, passed in getattr(self, "passed", {}).items():
            if self.mine(tenant):
                assert all(turns <= 2 * LONGEST + 1 for turns in passed.values())


def test_random_tenants() -> None:
    run_state_machine_as_test(QueueMachine, settings=settings(max_examples=60, stateful_step_count=40))
