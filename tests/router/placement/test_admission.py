"""Who runs, who waits, who is told to come back; and when a first token is predicted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

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

from common.errors import InvalidRequest, Overloaded
from router.index.global_index import GlobalIndex, as_hashes
from router.placement.admission import Admission
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import PlacementRequest
from router.placement.prediction import Prediction
from router.placement_options import AdmissionOptions, PolicyWeights
from tests.router.directory.test_directory import record
from wire.records import Role, WorkerLoad, WorkerRecord

WEIGHTS = PolicyWeights.model_validate({})
ROOMY = WorkerLoad(free_tokens=100_000, headroom_tokens=100_000, headroom_rows=100)


def ask(prompt: int = 100, output: float = 10, tenant: str = "", priority: int = 0) -> PlacementRequest:
    return PlacementRequest(prompt, as_hashes([]), output, tenant=tenant, priority=priority)


def prefill(name: str = "p", **load: Any) -> WorkerRecord:
    return record(name, load=WorkerLoad(**load))


def decode(name: str = "d", rows: int = 100, **load: Any) -> WorkerRecord:
    changes = {"free_tokens": 100_000, "headroom_tokens": 100_000, "headroom_rows": 100, **load}
    return record(
        name, role=Role.DECODE, load=WorkerLoad(**changes), total_tokens=100_000, max_running_requests=rows
    )


class House:
    """An admission with a placer over workers that only exist on paper."""

    def __init__(self, workers: Iterable[WorkerRecord] = (), **options: object) -> None:
        policy = make_policy("kv", WEIGHTS, 0, random.Random(1))
        self.placer = Placer(GlobalIndex(), policy, 10.0)
        self.placer.update(list(workers) or [prefill(), decode()], 0.0)
        self.admission = Admission(AdmissionOptions.model_validate(options), self.placer)
        self.asks: dict[int, PlacementRequest] = {}
        self.placements: dict[int, Placement] = {}

    def offer(self, room: int, one: PlacementRequest | None = None, now: float = 0.0) -> list[int]:
        """The rooms that may run by it."""
        self.asks[room] = one or ask()
        self.admission.check(1)
        self.admission.judge(self.asks[room], now)
        self.admission.enqueue(room, self.asks[room], now)
        return self.admit(now)

    def admit(self, now: float = 0.0) -> list[int]:
        admitted = []
        while (room := self.admission.admit(now)) is not None:
            choice = self.placer.choose(self.asks[room], now)
            if choice is not None:
                self.placements[room] = self.placer.place(choice, now)
                self.admission.placed(room, self.placements[room].prefill_tokens)
            admitted.append(room)
        return admitted

    def end(self, room: int, now: float = 0.0) -> list[int]:
        if room in self.placements:
            self.placer.close(self.placements.pop(room), now)
        self.admission.leave(room)
        return self.admit(now)

    def predict(self, one: PlacementRequest) -> Prediction | None:
        choice = self.placer.choose(one, 0.0)
        assert choice is not None
        return self.admission.predict(choice)


def test_without_a_queue_what_exceeds_the_places_is_refused() -> None:
    house = House(max_in_flight=2, max_queued=0)
    assert house.offer(1) == [1]
    assert house.offer(2) == [2]
    with pytest.raises(Overloaded, match="2 of 2 places are taken") as caught:
        house.offer(3)
    assert caught.value.retry_after_s == 1.0
    house.end(1)
    assert house.offer(3) == [3]
    with pytest.raises(InvalidRequest, match="3 choices"):
        house.admission.check(3)


def test_the_queue_is_bounded_and_moves_when_a_place_is_free() -> None:
    house = House(max_in_flight=1, max_queued=2)
    assert [house.offer(room) for room in (1, 2, 3)] == [[1], [], []]
    with pytest.raises(Overloaded, match="1 of 1 places and 2 of 2 in the queue are taken"):
        house.offer(4)
    assert house.end(1) == [2]
    assert house.offer(4) == []
    house.admission.leave(3)  # its client has gone
    assert house.end(2) == [4]
    assert (house.admission.queued, house.admission.in_flight) == (0, 1)


def test_several_rooms_of_a_request_are_taken_together_or_not_at_all() -> None:
    house = House(max_in_flight=3, max_queued=2, queue_decode_full=False)
    house.offer(1)
    house.admission.check(4 - 1)  # two places and one in the queue
    with pytest.raises(InvalidRequest):
        house.admission.check(4)
    house.offer(2)
    house.offer(3)
    house.offer(4)
    with pytest.raises(Overloaded):
        house.admission.check(2)


def test_whoever_waited_too_long_is_told_to_come_back() -> None:
    house = House(max_in_flight=1, max_queued=5, max_queue_s=10)
    house.offer(1, now=0.0)
    house.offer(2, now=1.0)
    house.offer(3, now=2.0)
    assert house.admission.overdue(10.9) == []
    late = house.admission.overdue(11.0)
    assert [(room, error.retry_after_s) for room, error in late] == [(2, 1.0)]
    assert house.admission.overdue(11.0) == []
    assert house.end(1, 11.5) == [3]


def test_rooms_of_an_accepted_request_wait_on() -> None:
    house = House(max_in_flight=1, max_queued=5, max_queue_s=10)
    for room in (1, 2, 3):
        house.offer(room, now=0.0)
    assert [room for room, _ in house.admission.overdue(11.0, lambda room: room == 2)] == [3]
    assert house.end(1, 100.0) == [2]


def test_rooms_wait_while_every_prefill_queue_is_long() -> None:
    options: dict[str, object] = {"max_queued": 9, "queue_prefill_tokens": 250}
    house = House([prefill("p", queued_prefill_tokens=300), prefill("q"), decode()], **options)
    assert [house.offer(room) for room in (1, 2, 3)] == [[1], [2], [3]]  # on q: 300 queued by then
    assert house.offer(4) == []
    house.placer.update([prefill("p", queued_prefill_tokens=200), prefill("q"), decode()], 1.0)
    assert house.admit(1.0) == [4]


def test_rooms_wait_while_no_decode_worker_has_memory() -> None:
    full = {"headroom_tokens": 0, "running_requests": 3}
    house = House([prefill(), decode("d", **full), decode("e", **full)], max_queued=9, queue_decode_full=True)
    assert house.offer(1) == []
    assert house.offer(2) == []
    house.placer.update([prefill(), decode("d", **full), decode("e", running_requests=3)], 1.0)
    assert house.admit(1.0) == [1, 2]


def test_a_long_prompt_waits_for_its_memory_on_the_worker() -> None:
    house = House([prefill(), decode(headroom_tokens=500, running_requests=3)])
    assert house.offer(1, ask(prompt=90_000)) == [1]
    assert house.offer(2, ask(prompt=10)) == []  # until the worker reports headroom again


def test_an_idle_decode_worker_is_never_full() -> None:
    tiny = decode("d", headroom_tokens=0, headroom_rows=0)
    house = House([prefill(), tiny], max_queued=9, queue_decode_full=True)
    assert house.offer(1, ask(prompt=90_000)) == [1]
    assert house.offer(2) == []
    assert house.end(1) == [2]


def test_rooms_wait_while_a_whole_batch_waits_on_every_decode_worker() -> None:
    house = House([decode("d", rows=2, prefill_tokens_per_s=0.0)])  # colocated: its queue takes no headroom
    assert [house.offer(room) for room in range(1, 6)] == [[1], [2], [3], [4], []]
    assert house.end(2) == [5]


def test_a_burst_on_workers_that_have_reported_nothing_is_accepted() -> None:
    unknown = record("d", role=Role.DECODE, load=WorkerLoad(), total_tokens=100_000, max_running_requests=64)
    house = House([record("p", load=WorkerLoad()), unknown])
    assert [house.offer(room) for room in range(64)] == [[room] for room in range(64)]


def test_a_burst_without_maxima_is_accepted_before_any_answer_is_known() -> None:
    house = House()
    one = ask(100, output=house.placer.output_tokens(90_000))
    assert [house.offer(room, one) for room in range(64)] == [[room] for room in range(64)]


def test_a_full_worker_that_is_suspected_keeps_nobody_waiting() -> None:
    house = House([prefill(), decode(headroom_rows=0, running_requests=3)])
    assert house.offer(1) == []
    house.placer.suspect(frozenset({"d"}))
    assert house.admit(6.0) == [1]


def test_by_default_a_room_waits_five_seconds_for_a_full_decode_worker() -> None:
    house = House([prefill(), decode(headroom_rows=0, running_requests=3)])
    assert house.offer(1, now=0.0) == []
    assert house.admission.overdue(4.9) == []
    assert [room for room, _ in house.admission.overdue(5.0)] == [1]


def test_rooms_that_wait_are_divided_among_the_full_decode_workers() -> None:
    full = {"headroom_rows": 0, "running_requests": 3}
    house = House([prefill(), decode("d", **full), decode("e", **full)])
    assert house.admission.waiting() == {}
    for room in range(3):
        assert house.offer(room) == []
    assert house.admission.waiting() == {"d": 1.5, "e": 1.5}
    house.placer.suspect(frozenset({"e"}))
    assert house.admission.waiting() == {"d": 3.0}
    house.placer.suspect(frozenset({"d", "e"}))
    assert house.admission.waiting() == {}, "more workers are no help to those that cannot be reached"


def test_rooms_that_wait_for_a_place_want_no_more_workers() -> None:
    house = House([prefill(), decode()], max_in_flight=1)
    assert [house.offer(room) for room in range(3)] == [[0], [], []]
    assert house.admission.waiting() == {}


def test_an_empty_fleet_is_not_saturated() -> None:
    house = House([record("x", draining=True)], max_queued=1, queue_decode_full=True, queue_prefill_tokens=0)
    assert house.offer(1) == [1]


def test_what_was_cached_is_not_charged() -> None:
    house = House(max_in_flight=1, max_queued=50)
    house.offer(0)
    for room in range(1, 13):
        house.offer(room, ask(tenant="hits" if room % 2 else "misses"))
    served, before = [], 0
    for _ in range(6):
        house.admission.leave(before)
        next_room = house.admission.admit(0.0)
        assert next_room is not None
        house.admission.placed(next_room, 20 if next_room % 2 else 100)
        served.append("hits" if next_room % 2 else "misses")
        before = next_room
    assert served.count("hits") == 5  # a hit costs a fifth of a miss


# -- predictions ------------------------------------------------------------------------------


def test_the_parts_of_a_time_to_first_token() -> None:
    fast = prefill("p", queued_prefill_tokens=3_000, prefill_tokens_per_s=1_000)
    house = House([fast, decode()])
    assert house.predict(ask(500)) == Prediction(queue_s=0.0, turn_s=3.0, memory_s=0.0, compute_s=0.5)


def test_an_unknown_rate_predicts_and_refuses_nothing() -> None:
    house = House([prefill("p", queued_prefill_tokens=1 << 30), decode()], max_ttft_s=0.1)
    assert house.predict(ask()) is None
    assert house.offer(1) == [1]


def test_too_late_is_refused_at_arrival_with_the_time_after_which_it_is_not() -> None:
    busy = prefill("p", queued_prefill_tokens=3_000, prefill_tokens_per_s=1_000)
    house = House([busy, decode()], max_ttft_s=2)
    with pytest.raises(Overloaded, match=r"after 3\.5 s, and 2 s are allowed") as caught:
        house.offer(1, ask(500))
    assert caught.value.retry_after_s == pytest.approx(1.5)
    assert house.offer(2, ask(500), now=1.6) == [2]  # the queue has projected


def test_a_prompt_that_is_long_in_itself_is_judged_by_its_wait() -> None:
    house = House(
        [prefill("p", queued_prefill_tokens=500, prefill_tokens_per_s=1_000), decode()], max_ttft_s=2
    )
    assert house.offer(1, ask(90_000)) == [1]


def test_the_queue_in_the_router_counts() -> None:
    house = House([prefill("p", prefill_tokens_per_s=100), decode()], max_in_flight=1, max_queued=9)
    house.offer(1)
    for room in (2, 3):
        house.offer(room, ask(200, tenant="a"))
    mine = house.predict(ask(100, tenant="a"))
    assert mine is not None
    assert (mine.queue_s, mine.turn_s, mine.compute_s) == (4.0, 1.0, 1.0)
    other = house.predict(ask(100, tenant="b"))
    assert other is not None
    assert other.queue_s <= 2.0  # it is next, or next but one


def test_places_are_free_at_the_pace_at_which_answers_end() -> None:
    running = {"running_requests": 10, "decode_step_s": 0.1, "free_tokens": 50_000}
    house = House(
        [prefill("p", prefill_tokens_per_s=1e9), decode("d", **running)], max_in_flight=1, max_queued=9
    )
    house.placer.answered(100)  # a request lives 10 s: one ends a second
    for room in (1, 2, 3):
        house.offer(room)
    seen = house.predict(ask())
    assert seen is not None
    assert seen.queue_s == pytest.approx(3.0)


def test_decode_is_predicted_to_have_memory_when_requests_have_ended() -> None:
    full = decode("d", running_requests=10, decode_step_s=0.1, free_tokens=0, headroom_tokens=0)
    house = House([prefill("p", prefill_tokens_per_s=1_000), full], max_queued=0, max_ttft_s=1)
    assert house.predict(ask(5_000)) is not None  # nobody knows how long answers are: no wait
    house.placer.answered(100)
    seen = house.predict(ask(20_000, output=0))
    assert seen is not None
    # one of 10 ends a second, with 10,000 tokens less what the others grow by: 10,000 - 50
    assert seen.memory_s == pytest.approx(20_000 / 9_950)
    assert seen.ttft_s == pytest.approx(seen.memory_s + 20.0)
    with pytest.raises(Overloaded):
        house.offer(1, ask(950))
    house.placer.update([prefill("p", prefill_tokens_per_s=1_000), decode("d")], 1.0)
    assert house.offer(1, ask(950), now=1.0) == [1]


def test_a_refusal_of_a_full_queue_tells_when_it_is_served() -> None:
    house = House([prefill("p", prefill_tokens_per_s=10), decode()], max_in_flight=1, max_queued=2)
    for room in (1, 2, 3):
        house.offer(room)
    with pytest.raises(Overloaded) as caught:
        house.offer(4)
    assert caught.value.retry_after_s == pytest.approx(20.0)


# -- anything goes ----------------------------------------------------------------------------


class Offers(RuleBasedStateMachine):
    """Every room that is offered is admitted, refused, overdue or gone: one of them, once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.room = 0
        self.fate: dict[int, str] = {}

    @initialize(
        places=st.integers(1, 4),
        queue=st.integers(0, 5),
        gate=st.none() | st.integers(0, 200),
        full=st.booleans(),
    )
    def start(self, places: int, queue: int, gate: int | None, full: bool) -> None:
        self.places, self.queue = places, queue
        self.house = House(
            max_in_flight=places, max_queued=queue, max_queue_s=5, queue_prefill_tokens=gate,
            queue_decode_full=full, max_ttft_s=4,
        )  # fmt: skip

    def rooms(self, fate: str) -> list[int]:
        return [room for room, known in self.fate.items() if known == fate]

    def running(self, admitted: list[int]) -> None:
        for room in admitted:
            assert self.fate[room] == "waits"
            self.fate[room] = "runs"

    @rule(tenant=st.sampled_from("abc"), prompt=st.integers(1, 300), count=st.integers(1, 3))
    def offer(self, tenant: str, prompt: int, count: int) -> None:
        one = ask(prompt, tenant=tenant)
        admission = self.house.admission
        try:
            admission.check(count)
            admission.judge(one, self.now)
        except (Overloaded, InvalidRequest):
            return
        for _ in range(count):
            self.room += 1
            self.house.asks[self.room] = one
            admission.enqueue(self.room, one, self.now)
            self.fate[self.room] = "waits"
        self.running(self.house.admit(self.now))

    @precondition(lambda self: self.rooms("runs"))
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def produce_or_end(self, data: st.DataObject, tokens: int) -> None:
        room = data.draw(st.sampled_from(self.rooms("runs")))
        self.house.admission.produced(room, tokens)
        if tokens > 10:
            self.fate[room] = "over"
            self.running(self.house.end(room, self.now))

    @precondition(lambda self: self.rooms("waits"))
    @rule(data=st.data())
    def client_goes(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self.rooms("waits")))
        self.fate[room] = "gone"
        self.house.admission.leave(room)
        self.house.admission.leave(room)
        self.running(self.house.admit(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for room, _ in self.house.admission.overdue(self.now):
            assert self.fate[room] == "waits"
            self.fate[room] = "overdue"
        self.running(self.house.admit(self.now))

    @rule(queued=st.integers(0, 300), headroom=st.sampled_from([0, 1000]), rate=st.sampled_from([0.0, 100.0]))
    def loads_change(self, queued: int, headroom: int, rate: float) -> None:
        p = prefill("p", queued_prefill_tokens=queued, prefill_tokens_per_s=rate)
        d = decode("d", headroom_tokens=headroom, running_requests=2, decode_step_s=0.01)
        self.house.placer.update([p, d], self.now)
        self.running(self.house.admit(self.now))

    @invariant()
    def bounds_hold(self) -> None:
        admission = self.house.admission
        assert admission.in_flight == len(self.rooms("runs")) <= self.places
        assert admission.queued == len(self.rooms("waits")) <= self.queue

    def teardown(self) -> None:
        """The load goes: everybody is served, and nothing is remembered."""
        if not hasattr(self, "house"):
            return
        self.house.placer.update([prefill(), decode()], self.now)
        for _ in range(self.room + 1):
            self.running(self.house.admit(self.now))
            for room in self.rooms("runs"):
                self.fate[room] = "over"
                self.running(self.house.end(room, self.now))
        assert not self.rooms("waits")
        assert not self.rooms("runs")
        # Private: a tenant that is remembered shows nowhere else.
        assert self.house.admission._queue.tenants == 0


def test_every_offer_has_one_fate() -> None:
    run_state_machine_as_test(Offers, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.invariants
def test_every_offer_has_one_fate_for_long() -> None:
    run_state_machine_as_test(Offers, settings=settings(max_examples=400, stateful_step_count=100))
