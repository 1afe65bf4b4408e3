"""Placer: what is booked is taken off again, whatever happens to the workers meanwhile."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from router.index.global_index import GlobalIndex, as_hashes
from router.placement.load_estimate import AssignedLoad
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import PlacementRequest
from tests.router.placement.test_policy import (
    PAGE,
    WEIGHTS,
    ask,
    chosen,
    decode,
    hold,
    names,
    placer,
    prefill,
)
from wire.records import Role, WorkerRecord


def test_what_was_placed_counts_before_any_report_and_until_it_is_over() -> None:
    made = placer("kv", [prefill("p"), prefill("q"), decode("d")])
    first = made.choose(ask(60), 0.0)
    assert first is not None
    placement = made.place(first, 0.0)
    other = PlacementRequest(960, as_hashes(range(1000, 1060)), 16)
    assert chosen(made.choose(other, 0.0))[0] != names(placement)[0]
    made.prefilled(placement, 0.1)
    made.prefilled(placement, 0.1)
    estimate = made.fleet.estimate(names(placement)[0] or "")
    assert estimate is not None
    assert (estimate.own.prefill_tokens, estimate.own.prefills, estimate.own.since_tokens) == (0, 0, 0)
    made.close(placement, 0.2)
    estimate = made.fleet.estimate("d")
    assert estimate is not None
    assert (estimate.own.requests, estimate.own.context_tokens) == (0, 0)


def test_headroom_is_what_decode_said_less_what_was_promised_since() -> None:
    made = placer("kv", [prefill("p"), decode("d")])
    placements = []
    for _ in range(3):
        choice = made.choose(ask(300), 0.0)
        assert choice is not None
        placements.append(made.place(choice, 0.0))
    assert [one.hold_prefill for one in placements] == [False, False, True]
    for one in placements:  # over before any report counted them
        made.close(one, 0.1)
    choice = made.choose(ask(300), 0.1)
    assert choice is not None
    assert not made.place(choice, 0.1).hold_prefill


def test_pages_on_their_way_draw_the_next_request_of_the_same_prompt_until_they_are_too_old() -> None:
    made = placer("kv", [prefill("p"), prefill("q", queued=300), decode("d")])
    choice = made.choose(ask(60), 0.0)
    assert choice is not None
    placement = made.place(choice, 0.0)
    again = made.choose(ask(60), 0.0)
    assert again is not None
    assert again.hit_tokens == 960
    made.tick(11.0)
    late = made.choose(ask(60), 11.0)
    assert late is not None
    assert late.hit_tokens == 0
    made.close(placement, 11.0)


def test_what_was_placed_just_before_a_report_is_not_taken_to_be_in_it() -> None:
    made = placer("kv", [prefill("p"), decode("d")])
    placements = []
    for at in (0.0, 0.98):
        choice = made.choose(ask(60), at)
        assert choice is not None
        placements.append(made.place(choice, at))
    made.update([prefill("p", queued=500), decode("d")], 1.0)
    estimate = made.fleet.estimate("p")
    assert estimate is not None
    assert estimate.own.since_tokens == placements[1].prefill_tokens
    assert made.fleet.candidates(1.0)[0].queued.tolist() == [500 + placements[1].prefill_tokens]
    for placement in placements:
        made.prefilled(placement, 1.1)
    assert made.fleet.candidates(1.1)[0].queued.tolist() == [500]


def test_what_was_placed_in_a_forward_counts_until_a_report_with_later_mail() -> None:
    made = placer("kv", [prefill("p"), decode("d")])

    def place(at: float) -> int:
        choice = made.choose(ask(60), at)
        assert choice is not None
        return made.place(choice, at).prefill_tokens

    def counted(queued: int, age_s: float, now: float) -> tuple[float, int]:
        """Tokens in P's queue that P did not report, and rooms promised to D, after reports of both."""
        made.update([prefill("p", queued, mail_age_s=age_s), decode("d", mail_age_s=age_s)], now)
        d = made.fleet.estimate("d")
        assert d is not None
        return made.fleet.candidates(now)[0].queued.item() - queued, d.own.promised_rooms

    first = place(0.1)
    assert counted(400, 1.0, 1.0) == (first, 1)  # the lease is renewed in a forward that began at 0
    second = place(1.1)
    third = place(1.3)
    assert counted(400, 2.0, 2.0) == (first + second + third, 3)
    assert counted(500, 0.9, 2.1) == (third, 1)  # the next one began at 1.2
    assert counted(600, 0.1, 3.0) == (0, 0)


def test_a_queue_shrinks_from_when_the_worker_looked_at_it() -> None:
    made = placer("kv", [prefill("p"), decode("d")])
    for now in (2.0, 3.0):  # at 1.5, after a forward of 1.4 s
        ages = {"age_s": now - 1.5, "mail_age_s": now - 0.1}
        made.update([prefill("p", 1000, prefill_tokens_per_s=400.0, **ages), decode("d")], now)
        assert made.fleet.candidates(3.5)[0].queued.tolist() == [200]


def test_what_is_said_to_be_cached_is_what_a_worker_can_use() -> None:
    """The last token is always computed, and with it its page."""
    made = placer("kv", [prefill("p"), decode("d")])
    hold(made, "p", 6)
    for tokens, said in ((96, 80), (97, 96), (200, 96), (40, 32)):
        prompt = PlacementRequest(tokens, as_hashes(range(tokens // PAGE)), 16)
        choice = made.choose(prompt, 0.0)
        assert choice is not None
        placement = made.place(choice, 0.0)
        assert (placement.hit_tokens, placement.prefill_tokens) == (said, tokens - said)
        made.close(placement, 0.0)


NAMES = ("p", "q", "d", "e")


class Books(RuleBasedStateMachine):
    """Rooms come and go; workers report, restart, leave, and come back; time passes."""

    @initialize(policy=st.sampled_from(["kv", "prefix-affinity"]))
    def start(self, policy: str) -> None:
        self.now = 0.0
        self.index = GlobalIndex()
        made = make_policy(policy, WEIGHTS, 16, random.Random(2))
        self.placer = Placer(self.index, made, expect_s=3.0)
        self.placements: list[Placement] = []
        self.records: dict[str, WorkerRecord] = {}
        for name in NAMES:
            self.records[name] = prefill(name) if name in "pq" else decode(name)
        self.update()

    def update(self) -> None:
        self.placer.update(list(self.records.values()), self.now)
        self.placer.page_tokens = PAGE

    @rule(
        first=st.integers(0, 3), pages=st.integers(0, 12), tail=st.integers(1, 20), name=st.text(max_size=1)
    )
    def book(self, first: int, pages: int, tail: int, name: str) -> None:
        prompt = PlacementRequest(
            pages * PAGE + tail, as_hashes(range(100 * first, 100 * first + pages)), 8, name
        )
        choice = self.placer.choose(prompt, self.now)
        if choice is None:
            assert not any(one.role is Role.DECODE for one in self.records.values())
        else:
            self.placements.append(self.placer.place(choice, self.now))

    @rule(index=st.integers(0, 100))
    def first_token(self, index: int) -> None:
        if self.placements:
            self.placer.prefilled(self.placements[index % len(self.placements)], self.now)

    @rule(index=st.integers(0, 100))
    def close(self, index: int) -> None:
        if self.placements:
            self.placer.close(self.placements.pop(index % len(self.placements)), self.now)

    @rule(name=st.sampled_from(NAMES), busy=st.integers(0, 1000), age_s=st.sampled_from([0.0, 0.1, 1.5]))
    def report(self, name: str, busy: int, age_s: float) -> None:
        if name in self.records:
            load = replace(
                self.records[name].load, queued_prefill_tokens=busy, running_requests=busy, mail_age_s=age_s
            )
            self.records[name] = replace(self.records[name], load=load)
            self.update()

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        if name in self.records:
            self.records[name] = replace(self.records[name], incarnation=self.records[name].incarnation + 1)
            self.index.reset(name)
            self.update()

    @rule(name=st.sampled_from(NAMES))
    def leave_or_join(self, name: str) -> None:
        if self.records.pop(name, None) is None:
            self.records[name] = prefill(name) if name in "pq" else decode(name)
        else:
            self.index.drop(name)
        self.update()

    @rule(seconds=st.floats(0.01, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.placer.tick(self.now)

    @invariant()
    def estimates_are_the_sums_of_the_placements(self) -> None:
        for estimate in self.placer.fleet.estimates():
            decoding = [one for one in self.placements if one.decode_load is estimate]
            prefilling = [
                one for one in self.placements if one.prefill_load is estimate and not one.prefilled
            ]
            own = estimate.own
            assert own.requests == len(decoding)
            assert own.context_tokens == sum(one.context_tokens for one in decoding)
            assert own.prefills == len(prefilling)
            assert own.prefill_tokens == sum(one.prefill_tokens for one in prefilling)
            assert 0 <= own.since_tokens <= own.prefill_tokens
            assert 0 <= own.promised_rooms <= own.requests

    @invariant()
    def rows_are_the_estimates(self) -> None:
        roles = self.placer.fleet.candidates(self.now)
        assert sorted([*roles[0].names, *roles[1].names]) == sorted(self.records)
        for rows in roles:
            for row, name in enumerate(rows.names):
                estimate = self.placer.fleet.estimate(name)
                assert estimate is not None
                assert rows.requests[row] == estimate.requests()
                assert (
                    rows.queued[row] == estimate.record.load.queued_prefill_tokens + estimate.own.since_tokens
                )

    def teardown(self) -> None:
        """Nothing is left in the end: neither on an estimate nor in the index, to which no event came."""
        if not hasattr(self, "placer"):
            return
        while self.placements:
            self.placer.close(self.placements.pop(), self.now)
        for estimate in self.placer.fleet.estimates():
            own = estimate.own
            assert own == AssignedLoad()
        self.placer.tick(self.now + 10.0)
        assert len(self.index) == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40)


def test_a_suspected_worker_gets_no_room_and_is_back_when_it_is_suspected_no_more() -> None:
    made = placer("kv", [prefill("p"), prefill("q"), decode("d"), decode("e")])
    made.suspect(frozenset({"p", "d"}))
    assert chosen(made.choose(ask(60), 0.0)) == ("q", "e")
    made.suspect(frozenset({"p", "q", "d"}))
    assert chosen(made.choose(ask(60), 0.0)) == (None, "e"), "D alone, rather than a suspected P"
    made.suspect(frozenset({"d", "e"}))
    assert made.choose(ask(60), 0.0) is None, "a room waits, rather than get a suspected D"
    made.suspect(frozenset())
    assert made.choose(ask(60), 0.0) is not None, "it is back"
