"""EventOrdering alone: against a publisher that loses, forgets, takes snapshots and begins anew."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.events.ordering import EventOrdering, OrderingStep, Verdict

CLEAR = b"clear"


def test_batches_come_out_in_order_once() -> None:
    ordering = EventOrdering()
    assert list(ordering.live(0, b"0")) == [b"0"]
    assert list(ordering.live(0, b"0")) == []
    assert ordering.distrusted, "it has come before: is it another publisher's?"
    assert list(ordering.live(1, b"1")) == [], "until that is known nobody listens"
    assert ordering.request_replay() == 0, "from the last that was applied"
    assert ordering.replayed(0, b"0") == OrderingStep(())
    assert ordering.replay_ended() == OrderingStep([])
    assert not ordering.distrusted
    assert list(ordering.live(2, b"2")) == []
    assert ordering.gap
    assert ordering.request_replay() == 0
    assert not ordering.gap
    assert ordering.replayed(0, b"0") == OrderingStep(())
    assert ordering.replayed(1, b"1") == OrderingStep([b"1", b"2"])
    assert ordering.replay_ended() == OrderingStep([])
    assert (ordering.gap, ordering.replaying, ordering.expected) == (False, False, 3)


def test_a_reply_that_begins_later_replaces_and_live_batches_wait_for_its_end() -> None:
    ordering = EventOrdering()
    ordering.live(6, b"live 6")
    assert ordering.request_replay() == 0
    assert ordering.replayed(4, CLEAR) == OrderingStep((CLEAR,), Verdict.REPLACE)
    assert ordering.live(7, b"live 7") == ()
    assert ordering.replayed(5, b"part") == OrderingStep((b"part",))
    assert ordering.replayed(6, b"last part") == OrderingStep((b"last part",)), "not the live one"
    assert ordering.replay_ended() == OrderingStep([b"live 7"])
    assert ordering.request_replay() == 7


def test_what_breaks_off_or_has_a_hole_in_a_replacement_starts_over() -> None:
    for broken in (True, False):
        ordering = EventOrdering()
        ordering.request_replay()
        ordering.replayed(4, CLEAR)
        verdict = ordering.abandon_replay() if broken else ordering.replayed(6, b"6").verdict
        assert verdict is Verdict.START_OVER
    ordering = EventOrdering()
    ordering.request_replay()
    ordering.replayed(0, b"0")
    assert ordering.abandon_replay() is Verdict.APPLY, "a replay can be requested again"


def test_another_stream_is_known_by_what_it_lacks_or_has_instead() -> None:
    for reply in ([], [(1, b"other")]):
        ordering = EventOrdering()
        ordering.live(0, b"0")
        ordering.live(1, b"1")
        assert ordering.request_replay() == 1
        steps = [ordering.replayed(*batch) for batch in reply] or [ordering.replay_ended()]
        assert [step.verdict for step in steps] == [Verdict.START_OVER]
    ordering = EventOrdering()
    ordering.request_replay()
    ordering.live(0, b"0")
    assert ordering.replay_ended().verdict is Verdict.APPLY, "it was asked before there was anything"


def test_a_new_connection_is_believed_only_after_a_reply_that_was_asked_for_on_it() -> None:
    ordering = EventOrdering()
    ordering.live(1, b"old 1")
    ordering.distrust()
    ordering.request_replay()
    assert ordering.replayed(0, b"new 0") == OrderingStep([b"new 0"]), "what came before is not put behind it"
    ordering.distrust()
    assert ordering.replay_ended() == OrderingStep([])
    assert ordering.distrusted, "it was asked before"
    assert ordering.live(1, b"who knows") == ()
    assert ordering.request_replay() == 0
    assert ordering.replayed(0, b"new 0") == OrderingStep(())
    assert ordering.replay_ended() == OrderingStep([])
    assert ordering.live(1, b"new 1") == (b"new 1",)


def test_a_reply_that_was_asked_before_distrust_is_not_put_behind_what_came_meanwhile() -> None:
    ordering = EventOrdering()
    ordering.request_replay()
    assert ordering.live(0, b"old 0") == (b"old 0",)
    ordering.distrust()
    assert [ordering.replayed(0, b"new 0"), ordering.replayed(1, b"new 1"), ordering.replay_ended()] == [
        OrderingStep(()), OrderingStep(()), OrderingStep([]),
    ]  # fmt: skip
    assert ordering.request_replay() == 0
    assert ordering.replayed(0, b"new 0").verdict is Verdict.START_OVER


def test_a_snapshot_and_distrust_leave_nothing_to_compare() -> None:
    ordering = EventOrdering()
    ordering.request_replay()
    assert ordering.replayed(5, b"snapshot").verdict is Verdict.REPLACE
    ordering.replay_ended()
    ordering.distrust()
    assert ordering.request_replay() == 5
    assert ordering.replayed(5, b"who knows").verdict is Verdict.START_OVER


class OrderingMachine(RuleBasedStateMachine):
    """A publisher whose batches are "page n is there now" and "page n is gone"; a consumer by the rules."""

    @initialize(buffer=st.integers(1, 6), snapshots=st.booleans())
    def build(self, buffer: int, snapshots: bool) -> None:
        self.buffer, self.snapshots = buffer, snapshots
        self.streams = 0
        self.begin_publisher()
        self.begin_consumer()

    def begin_publisher(self) -> None:
        self.streams += 1
        self.tree: set[int] = set()
        self.batches: list[bytes] = []
        self.on_their_way: list[tuple[int, bytes] | None] = []

    def begin_consumer(self) -> None:
        self.ordering = EventOrdering()
        self.believed: set[int] = set()
        self.exact = True
        self.reply: list[tuple[int, bytes] | None] = []

    # -- the publisher -------------------------------------------------------------------------------

    @rule(page=st.integers(0, 9), lost=st.booleans())
    def publish(self, page: int, lost: bool) -> None:
        self.tree ^= {page}
        batch = b"%d:%d:%d" % (self.streams, len(self.batches), page if page in self.tree else -page - 1)
        if not lost:
            self.on_their_way.append((len(self.batches), batch))
        self.batches.append(batch)

    @rule()
    def restart(self) -> None:
        """At the same address: what is on its way still comes, then a new connection; a reply breaks off."""
        late = self.on_their_way
        self.begin_publisher()
        self.on_their_way = [*late, None]
        if self.ordering.replaying:
            self.reply = []
            self.obey(OrderingStep((), self.ordering.abandon_replay()))

    @precondition(lambda self: not self.ordering.replaying)
    @rule(parts=st.integers(1, 6))
    def ask(self, parts: int) -> None:
        start, end = self.ordering.request_replay(), len(self.batches)
        oldest = max(0, end - self.buffer)
        if start < oldest and self.snapshots:
            pages = sorted(self.tree)
            parts = min(parts, self.buffer)
            told = [
                CLEAR,
                *(b"0:0:" + b",".join(b"%d" % page for page in pages[i::parts]) for i in range(parts)),
            ]
            told = [told[0] + b";" + told[1], *told[2:]]
            self.reply = [*enumerate(told, end - len(told)), None]
        else:
            kept = range(max(start, oldest), end)
            self.reply = [*((number, self.batches[number]) for number in kept), None]

    # -- the consumer --------------------------------------------------------------------------------

    @precondition(lambda self: self.on_their_way)
    @rule(count=st.integers(1, 5))
    def hear(self, count: int) -> None:
        for heard in self.on_their_way[:count]:
            if heard is None:
                self.ordering.distrust()
            else:
                self.apply(self.ordering.live(*heard))
        del self.on_their_way[:count]

    @precondition(lambda self: self.reply)
    @rule(count=st.integers(1, 5))
    def receive(self, count: int) -> None:
        for _ in range(min(count, len(self.reply))):
            if not self.reply:
                return  # it started over
            part = self.reply.pop(0)
            self.obey(self.ordering.replay_ended() if part is None else self.ordering.replayed(*part))

    @precondition(lambda self: self.ordering.replaying)
    @rule()
    def lose_connection(self) -> None:
        self.reply = []
        self.obey(OrderingStep((), self.ordering.abandon_replay()))

    def obey(self, step: OrderingStep) -> None:
        if step.verdict is Verdict.START_OVER:
            self.begin_consumer()
            return
        if step.verdict is Verdict.REPLACE:
            self.believed = set()
            self.exact = step.batches[0].startswith(CLEAR)
        self.apply(step.batches)

    def apply(self, batches: object) -> None:
        for batch in batches:  # type: ignore[attr-defined]
            for page in batch.rpartition(b":")[2].split(b","):
                if page and int(page) >= 0:
                    self.believed.add(int(page))
                elif page:
                    self.believed.discard(-int(page) - 1)

    def teardown(self) -> None:
        """Nothing more is lost: three replies are enough, whatever has happened."""
        if not hasattr(self, "tree"):
            return
        for _ in range(4):
            self.hear(10_000)
            if not self.ordering.replaying:
                self.ask(2)
            self.receive(10_000)
        assert not self.ordering.gap
        assert self.believed == self.tree if self.exact else self.believed <= self.tree


def test_whatever_happens_the_consumer_ends_with_what_is_there() -> None:
    run_state_machine_as_test(OrderingMachine, settings=settings(max_examples=150, stateful_step_count=30))
