"""Placer: what is booked is taken off again, whatever happens to the workers meanwhile."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from router.index.global_index import GlobalIndex, as_hashes
from router.placement.fleet import Given
from router.placement.placer import Booking, Placer
from router.placement.policies import make_policy
from router.placement.policy import Ask
from tests.router.placement.test_policy import PAGE, WEIGHTS, ask, chosen, decode, hold, placer, prefill
from wire.records import Role, WorkerRecord


def test_what_was_placed_counts_before_any_report_and_until_it_is_over() -> None:
    made = placer("kv", [prefill("p"), prefill("q"), decode("d")])
    first = made.choose(ask(60), 0.0)
    assert first is not None
    booking = made.book(ask(60), first, 0.0)
    other = Ask(960, as_hashes(range(1000, 1060)), 16)
    assert chosen(made.choose(other, 0.0))[0] != booking.prefill
    made.prefilled(booking, 0.1)
    made.prefilled(booking, 0.1)
    account = made.fleet.account(booking.prefill or "")
    assert account is not None
    assert (account.own.prefill_tokens, account.own.prefills, account.own.since_tokens) == (0, 0, 0)
    made.close(booking, 0.2)
    account = made.fleet.account("d")
    assert account is not None
    assert (account.own.requests, account.own.context_tokens) == (0, 0)


def test_headroom_is_what_decode_said_less_what_was_promised_since() -> None:
    made = placer("kv", [prefill("p"), decode("d")])
    bookings = []
    for _ in range(3):
        choice = made.choose(ask(300), 0.0)
        assert choice is not None
        bookings.append(made.book(ask(300), choice, 0.0))
    assert [one.fits for one in bookings] == [True, True, False]
    for one in bookings:  # over before any report counted them
        made.close(one, 0.1)
    choice = made.choose(ask(300), 0.1)
    assert choice is not None
    assert made.book(ask(300), choice, 0.1).fits


def test_pages_on_their_way_draw_the_next_request_of_the_same_prompt_until_they_are_too_old() -> None:
    made = placer("kv", [prefill("p"), prefill("q", queued=300), decode("d")])
    choice = made.choose(ask(60), 0.0)
    assert choice is not None
    booking = made.book(ask(60), choice, 0.0)
    again = made.choose(ask(60), 0.0)
    assert again is not None
    assert again.hit_tokens == 960
    made.tick(11.0)
    late = made.choose(ask(60), 11.0)
    assert late is not None
    assert late.hit_tokens == 0
    made.close(booking, 11.0)


def test_what_was_placed_just_before_a_report_is_not_taken_to_be_in_it() -> None:
    made = placer("kv", [prefill("p"), decode("d")])
    bookings = []
    for at in (0.0, 0.98):
        choice = made.choose(ask(60), at)
        assert choice is not None
        bookings.append(made.book(ask(60), choice, at))
    made.update([prefill("p", queued=500), decode("d")], 1.0)
    account = made.fleet.account("p")
    assert account is not None
    assert account.own.since_tokens == bookings[1].prefill_tokens
    assert made.fleet.candidates(1.0).prefill.queued.tolist() == [500 + bookings[1].prefill_tokens]
    for booking in bookings:
        made.prefilled(booking, 1.1)
    assert made.fleet.candidates(1.1).prefill.queued.tolist() == [500]


def test_what_is_said_to_be_cached_is_what_a_worker_can_use() -> None:
    """The last token is always computed, and with it its page."""
    made = placer("kv", [prefill("p"), decode("d")])
    hold(made, "p", 6)
    for tokens, said in ((96, 80), (97, 96), (200, 96), (40, 32)):
        prompt = Ask(tokens, as_hashes(range(tokens // PAGE)), 16)
        choice = made.choose(prompt, 0.0)
        assert choice is not None
        booking = made.book(prompt, choice, 0.0)
        assert (booking.hit_tokens, booking.prefill_tokens) == (said, tokens - said)
        made.close(booking, 0.0)


NAMES = ("p", "q", "d", "e")


class Books(RuleBasedStateMachine):
    """Rooms come and go; workers report, restart, leave, and come back; time passes."""

    @initialize(policy=st.sampled_from(["kv", "prefix-affinity"]))
    def start(self, policy: str) -> None:
        self.now = 0.0
        self.index = GlobalIndex()
        made = make_policy(policy, WEIGHTS, 16, random.Random(2))
        self.placer = Placer(self.index, made, expect_s=3.0)
        self.bookings: list[Booking] = []
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
        prompt = Ask(pages * PAGE + tail, as_hashes(range(100 * first, 100 * first + pages)), 8, name)
        choice = self.placer.choose(prompt, self.now)
        if choice is None:
            assert not any(one.role is Role.DECODE for one in self.records.values())
        else:
            self.bookings.append(self.placer.book(prompt, choice, self.now))

    @rule(index=st.integers(0, 100))
    def first_token(self, index: int) -> None:
        if self.bookings:
            self.placer.prefilled(self.bookings[index % len(self.bookings)], self.now)

    @rule(index=st.integers(0, 100))
    def close(self, index: int) -> None:
        if self.bookings:
            self.placer.close(self.bookings.pop(index % len(self.bookings)), self.now)

    @rule(name=st.sampled_from(NAMES), busy=st.integers(0, 1000))
    def report(self, name: str, busy: int) -> None:
        if name in self.records:
            load = replace(self.records[name].load, queued_prefill_tokens=busy, running_requests=busy)
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
    def accounts_are_the_sums_of_what_is_booked(self) -> None:
        for account in self.placer.fleet.accounts():
            decoding = [one for one in self.bookings if one.decoder is account]
            prefilling = [one for one in self.bookings if one.prefiller is account and not one.prefilled]
            own = account.own
            assert own.requests == len(decoding)
            assert own.context_tokens == sum(one.context_tokens for one in decoding)
            assert own.prefills == len(prefilling)
            assert own.prefill_tokens == sum(one.prefill_tokens for one in prefilling)
            assert 0 <= own.since_tokens <= own.prefill_tokens
            assert 0 <= own.promised_rooms <= own.requests

    @invariant()
    def rows_are_the_accounts(self) -> None:
        candidates = self.placer.fleet.candidates(self.now)
        assert sorted([*candidates.prefill.names, *candidates.decode.names]) == sorted(self.records)
        for rows in (candidates.prefill, candidates.decode):
            for row, name in enumerate(rows.names):
                account = self.placer.fleet.account(name)
                assert account is not None
                assert rows.requests[row] == account.requests()
                assert (
                    rows.queued[row] == account.record.load.queued_prefill_tokens + account.own.since_tokens
                )

    def teardown(self) -> None:
        """Nothing is left in the end: neither on an account nor in the index, to which no event came."""
        if not hasattr(self, "placer"):
            return
        while self.bookings:
            self.placer.close(self.bookings.pop(), self.now)
        for account in self.placer.fleet.accounts():
            own = account.own
            assert own == Given()
        self.placer.tick(self.now + 10.0)
        assert len(self.index) == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
