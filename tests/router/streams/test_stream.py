"""The room's state machine with a fake host and no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from common.errors import BatonError, InvalidRequest, Overloaded, RequestFailed, Unavailable
from router.index.global_index import as_hashes
from router.options import RouterOptions
from router.placement.broken_pairs import BrokenPairs
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.placement import Placement
from router.placement.policy import Choice, PlacementRequest
from router.streams.restarts import RestartCause
from router.streams.stream import RoomStream
from tests.router.directory.test_directory import record
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Abort, Decode, Prefill, Rejected, RejectKind, Resend, RoomStatus
from wire.records import Role, WorkerLoad, WorkerRecord
from wire.request import FinishReason, GenerateRequest, OutputDelta, SamplingParams, TokenLogprobs, TokenRun
from wire.retransmitter import RetransmitKey
from wire.stages import RequestStage

P, D, E = record("p"), record("d", role=Role.DECODE), record("e", role=Role.DECODE)
OPTIONS = RouterOptions(
    model=Path("m"), served_model_name="m", silence_s=1, worker_wait_s=5, hold_prefill_s=2, max_restarts=2,
)  # fmt: skip


class Host:
    """Places rooms as told, and writes down what was said."""

    def __init__(self, *placements: Placement | None) -> None:
        self.placements = list(placements)
        self.said: list[AnyMessage] = []
        self.pending: dict[RetransmitKey, AnyMessage] = {}
        self.avoided: list[frozenset[str]] = []
        self.broken_pairs = BrokenPairs()
        self.booked = 0
        self.closed_rooms = 0
        self.accepted = False
        self.causes: list[RestartCause] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.wanted = 100  # tokens; the room stops with them
        self.error: BatonError | None = None
        self.bug: Exception | None = None  # is raised by tokens

    def place(self, room: RoomStream, avoid: frozenset[str], choice: Choice | None) -> Placement | None:
        self.avoided.append(avoid)
        placement = self.placements.pop(0) if len(self.placements) > 1 else self.placements[0]
        self.booked += placement is not None
        return placement

    def unplace(self, room: RoomStream, placement: Placement) -> None:
        self.booked -= 1

    def prefilled(self, room: RoomStream, placement: Placement) -> None:
        pass

    def send(self, to: str, message: AnyMessage) -> None:
        self.said.append(message)

    def say(self, key: RetransmitKey, message: AnyMessage) -> None:
        self.said.append(message)
        self.pending[key] = message

    def answered(self, key: RetransmitKey) -> None:
        self.pending.pop(key, None)

    def restarted(self, room: RoomStream, cause: RestartCause) -> None:
        self.causes.append(cause)

    def closed(self, room: RoomStream) -> None:
        self.closed_rooms += 1

    def on_tokens(self, delta: OutputDelta, cached_tokens: int) -> bool:
        if self.bug is not None:
            raise self.bug
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.finish = delta.finish
        return len(self.tokens) >= self.wanted

    def on_admitted(self) -> None:
        self.accepted = True

    def on_error(self, error: BatonError) -> None:
        self.error = error

    def of(self, kind: type) -> list[AnyMessage]:
        return [message for message in self.said if isinstance(message, kind)]


def started(*placements: Placement | None) -> tuple[Host, RoomStream]:
    host = Host(*placements)
    request = GenerateRequest(
        request_id="r", room=1, epoch=0, prompt=b"\0\0\0\0", sampling=SamplingParams(max_new_tokens=4)
    )
    room = RoomStream(request, PlacementRequest(1, as_hashes([]), 4.0), host, host, host, OPTIONS)
    room.start(0.0)
    return host, room


def placed(decode: WorkerRecord, prefill: WorkerRecord | None, hold_prefill: bool = False) -> Placement:
    """Workers, with a load that is not counted anywhere."""
    load = WorkerLoadEstimate(decode, 0.0)
    return Placement(decode, prefill, hold_prefill, 0, 1, 1, load, load, 1, 0, [])


PAIR = placed(D, P)
HELD = placed(D, P, hold_prefill=True)
ALONE = placed(D, None)


def run(start: int, *tokens: int, epoch: int = 0, finish: FinishReason | None = None) -> TokenRun:
    return TokenRun(1, epoch, start, list(tokens), finish=finish)


def test_both_are_told_at_once_and_the_first_token_is_forwarded_once() -> None:
    host, room = started(PAIR)
    (decode,), (prefill,) = host.of(Decode), host.of(Prefill)
    assert isinstance(decode, Decode)
    assert isinstance(prefill, Prefill)
    assert (decode.prefill, prefill.decode) == (P.mailbox, D.mailbox)
    assert room.on_run(P.mailbox, run(0, 5), 0.1) == 1
    assert room.on_run(D.mailbox, run(0, 5, 6), 0.2) == 2
    assert room.on_run(D.mailbox, run(0, 5, 6), 0.3) == 2
    assert room.on_run(D.mailbox, run(2, 7, 8, finish=FinishReason.LENGTH), 0.4) == 4
    assert host.tokens == [5, 6, 7, 8]
    assert (room.done, host.booked, host.closed_rooms, host.of(Abort)) == (True, 0, 1, [])
    assert host.pending == {}
    room.on_run(D.mailbox, run(2, 7, 8, finish=FinishReason.LENGTH), 0.5)
    assert (host.tokens, host.closed_rooms) == ([5, 6, 7, 8], 1)


def test_a_prefill_held_back_goes_with_reserved_once() -> None:
    host, room = started(HELD)
    assert host.of(Prefill) == []
    room.on_reserved(epoch=7)
    assert host.of(Prefill) == []
    room.on_reserved(0)
    room.on_reserved(0)
    assert len(host.of(Prefill)) == 1


def test_a_prefill_held_back_goes_after_a_while_when_reserved_is_lost() -> None:
    host, room = started(HELD)
    room.tick(1.9)
    assert host.of(Prefill) == []
    room.tick(2.0)
    assert len(host.of(Prefill)) == 1


def test_a_gap_is_asked_for_and_not_forwarded() -> None:
    host, room = started(ALONE)
    room.on_run(D.mailbox, run(0, 5), 0.1)
    assert room.on_run(D.mailbox, run(2, 7), 0.2) == 1
    assert host.of(Resend) == [Resend(1, 0, 1)]
    room.on_run(D.mailbox, run(1, 6, 7), 0.3)
    assert host.tokens == [5, 6, 7]


def test_silence_is_asked_about_at_intervals_that_double() -> None:
    host, room = started(PAIR)
    asked = []
    for tenth in range(200):
        before = len(host.of(Resend))
        room.tick(tenth / 10)
        if len(host.of(Resend)) > before:
            asked.append(tenth / 10)
    assert asked == [1.0, 3.0, 7.0, 15.0]
    assert len(host.of(Resend)) == 8  # D and P, as long as no token came


def test_logprobs_are_cut_with_their_tokens() -> None:
    host, room = started(ALONE)
    a, b = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
    room.on_run(D.mailbox, TokenRun(1, 0, 0, [5], [a]), 0.1)
    room.on_run(D.mailbox, TokenRun(1, 0, 0, [5, 6], [a, b]), 0.2)
    assert host.logprobs == [a, b]


def test_a_request_that_fails_alone_is_tried_once_more_and_then_refused() -> None:
    host, room = started(ALONE, placed(E, None))
    room.on_rejected(D.mailbox, Rejected(1, 0, RejectKind.FAILED_ALONE, "room 1: not finite"), 0.1)
    assert host.avoided[-1] == frozenset({"d"})
    assert [message.epoch for message in host.of(Decode)] == [0, 1]
    assert host.error is None
    room.on_rejected(E.mailbox, Rejected(1, 1, RejectKind.FAILED_ALONE, "room 1: not finite"), 0.2)
    assert isinstance(host.error, RequestFailed)
    assert "worker e: room 1: not finite" in str(host.error)
    assert room.done
    assert host.booked == 0


@pytest.mark.parametrize("why", [RejectKind.DRAINING, RejectKind.FAILED, RejectKind.UNKNOWN])
def test_a_rejection_starts_again_with_what_was_forwarded(why: RejectKind) -> None:
    host, room = started(PAIR, placed(E, None))
    room.on_run(D.mailbox, run(0, 5, 6), 0.1)
    room.on_rejected(D.mailbox, Rejected(1, 0, why, "no"), 0.2)
    room.on_rejected(D.mailbox, Rejected(1, 0, why, "no"), 0.2)
    again = host.of(Decode)[-1]
    assert isinstance(again, Decode)
    assert (again.epoch, again.request.forced, again.prefill) == (1, (5, 6), None)
    assert host.avoided == [frozenset(), {"d"}]
    assert host.causes == [RestartCause(why)]
    assert {type(m) for m in host.pending.values()} == {Abort, Decode}
    assert host.booked == 1
    room.on_run(D.mailbox, run(2, 99), 0.3)  # the old epoch speaks on
    room.on_run(E.mailbox, run(2, 7, 8, epoch=1, finish=FinishReason.LENGTH), 0.4)
    assert host.tokens == [5, 6, 7, 8]


def test_an_invalid_request_is_not_tried_again() -> None:
    host, room = started(PAIR)
    room.on_rejected(P.mailbox, Rejected(1, 0, RejectKind.INVALID, "no good"), 0.1)
    assert isinstance(host.error, InvalidRequest)
    assert (room.done, host.booked) == (True, 0)


def test_overload_everywhere_becomes_the_clients_429() -> None:
    host, room = started(PAIR)
    for epoch in range(3):
        room.tick(10.0 * epoch)
        room.on_rejected(D.mailbox, Rejected(1, epoch, RejectKind.OVERLOADED, "full", 7.0), 10.0 * epoch)
    assert isinstance(host.error, Overloaded)
    assert host.error.retry_after_s == 7.0
    assert len(host.of(Decode)) == 3


def test_prefill_is_not_needed_any_more_once_decode_speaks() -> None:
    _, room = started(PAIR)
    room.on_run(P.mailbox, run(0, 5), 0.1)
    room.on_run(D.mailbox, run(0, 5, 6), 0.2)
    room.on_worker_gone(P, "was lost", 0.3)
    room.on_rejected(P.mailbox, Rejected(1, 0, RejectKind.UNKNOWN, "who?"), 0.3)
    assert room.request.epoch == 0
    room.on_worker_gone(D, "was lost", 0.4)
    assert room.request.epoch == 1


def test_prefill_lost_before_decode_speaks_starts_again() -> None:
    host, room = started(PAIR)
    room.on_run(P.mailbox, run(0, 5), 0.1)
    room.on_worker_gone(P, "was lost", 0.2)
    again = host.of(Decode)[-1]
    assert isinstance(again, Decode)
    assert again.request.forced == (5,)


def test_a_worker_that_acknowledges_nothing_is_left() -> None:
    _, room = started(PAIR)
    room.on_given_up(RetransmitKey(P.mailbox, 1, 0, "prefill"), 5.0)
    assert room.request.epoch == 1
    room.on_given_up(RetransmitKey(P.mailbox, 1, 0, "prefill"), 5.1)
    room.on_given_up(RetransmitKey(P.mailbox, 1, 1, "abort"), 5.1)
    assert room.request.epoch == 1


def test_no_timer_ends_an_epoch_and_its_workers_say_where_it_is() -> None:
    host, room = started(PAIR)
    for now in range(0, 4000):
        room.tick(float(now))
        if now % 100 == 50:
            said = RoomStatus(1, 0, RequestStage.DECODE_BOOTSTRAP, 70 - now // 100, "")
            assert room.on_status(D.mailbox, said, float(now)) == "d"
            ready = RoomStatus(1, 0, RequestStage.PREFILL_BOOTSTRAP, 0, D.mailbox)
            assert room.on_status(P.mailbox, ready, float(now)) == "p"
    assert (room.request.epoch, host.error) == (0, None)
    assert host.pending == {}, "a status is as good as a receipt"
    report = room.report(4000.0)
    assert [(one.id, one.stage, one.place, one.waits_for) for one in report.workers] == [
        ("p", "prefill_bootstrap", 0, D.mailbox),
        ("d", "decode_bootstrap", 31, ""),
    ]
    assert room.on_status(D.mailbox, RoomStatus(1, 1, RequestStage.DECODE_LOOP), 4000.0) is None
    assert room.on_status(E.mailbox, RoomStatus(1, 0, RequestStage.DECODE_LOOP), 4000.0) is None
    room.on_run(D.mailbox, run(0, 5, 6, 7, 8, finish=FinishReason.LENGTH), 4001.0)
    assert host.tokens == [5, 6, 7, 8]


def test_progress_restores_the_budget() -> None:
    """Twenty restarts of one stream, each after a token; then three without one."""
    host, room = started(PAIR)
    room.request = replace(room.request, sampling=SamplingParams(max_new_tokens=100))
    for epoch in range(20):
        room.on_run(D.mailbox, run(epoch, 5, epoch=epoch), float(epoch))
        room.on_worker_gone(D, "was lost", float(epoch))
        assert (room.request.epoch, host.error) == (epoch + 1, None)
    assert host.tokens == [5] * 20
    for epoch in range(20, 22):
        room.tick(epoch * 10.0)
        room.on_worker_gone(D, "was lost", epoch * 10.0)
    assert isinstance(host.error, Unavailable)
    assert "worker d was lost" in str(host.error)
    assert host.causes == [RestartCause.GONE] * 21


def test_a_request_that_ends_every_worker_it_meets_fails_with_the_last_of_them() -> None:
    host, room = started(PAIR, placed(E, None), ALONE)
    for now, (epoch, worker) in enumerate([(0, D), (1, E), (2, D)]):
        room.tick(10.0 * now)
        assert room.request.epoch == epoch
        room.on_worker_gone(worker, "has exited", 10.0 * now)
    assert isinstance(host.error, Unavailable)
    assert str(host.error) == "worker d has exited; before that, 2 restarts brought no new token"
    assert (room.done, host.booked) == (True, 0)


def test_workers_that_leave_and_links_that_break_cost_nothing() -> None:
    host, room = started(PAIR)
    now = 0.0
    for epoch in range(30):
        room.tick(now)
        rejected = Rejected(1, epoch, RejectKind.DRAINING, "leaving")
        if epoch % 2:
            rejected = Rejected(1, epoch, RejectKind.FAILED, "no KV from prefill", blamed=P.mailbox)
        room.on_rejected(D.mailbox, rejected, now)
        now += 10.0
    assert (host.error, room.request.epoch) == (None, 30)
    assert set(host.causes) == {RestartCause.DRAINING, RestartCause.LINK}


@pytest.mark.parametrize(("sender", "blamed"), [(D, P), (P, D)], ids=["D says it", "P says it"])
def test_a_broken_pair_costs_the_room_its_prefill_worker_and_nobody_else(
    sender: WorkerRecord, blamed: WorkerRecord
) -> None:
    host, room = started(PAIR, ALONE)
    said = Rejected(1, 0, RejectKind.FAILED, "no KV from prefill", blamed=blamed.mailbox)
    room.on_rejected(sender.mailbox, said, 0.1)
    assert host.avoided == [frozenset(), {"p"}]
    assert host.causes == [RestartCause.LINK]
    room.on_rejected(D.mailbox, Rejected(1, 1, RejectKind.FAILED, "engine"), 0.2)
    room.tick(1.0)
    assert host.avoided[-1] == {"p", "d"}


def test_pairs_that_get_through_and_those_that_do_not_are_remembered_for_all_rooms() -> None:
    host, room = started(PAIR)
    room.on_rejected(P.mailbox, Rejected(1, 0, RejectKind.FAILED, "x", blamed=D.mailbox), 0.1)
    assert host.broken_pairs.broken(P.id, D.id, 0.1)
    room.on_run(P.mailbox, run(0, 5, epoch=1), 0.2)
    assert host.broken_pairs.broken(P.id, D.id, 0.2), "that P computes does not say that D has it"
    room.on_run(D.mailbox, run(0, 5, 6, epoch=1), 0.3)
    assert not host.broken_pairs.broken(P.id, D.id, 0.3)


def test_a_worker_that_is_avoided_for_another_is_absolved_when_that_one_is_gone() -> None:
    host, room = started(PAIR, ALONE, PAIR)
    room.on_rejected(P.mailbox, Rejected(1, 0, RejectKind.FAILED, "x", blamed=D.mailbox), 0.1)
    room.on_worker_gone(D, "does not answer heartbeats", 0.2)
    room.tick(1.0)
    assert host.avoided == [frozenset(), {"p"}, frozenset()]


def test_nobody_is_avoided_for_ever() -> None:
    host, room = started(PAIR)
    room.on_rejected(D.mailbox, Rejected(1, 0, RejectKind.FAILED, "no"), 0.1)
    room.on_rejected(D.mailbox, Rejected(1, 1, RejectKind.FAILED, "no"), 60.0)
    assert host.avoided == [frozenset(), {"d"}]
    room.tick(60.2)
    assert host.avoided[-1] == {"d"}
    room.on_run(D.mailbox, run(0, 5, epoch=2), 60.3)
    room.on_rejected(P.mailbox, Rejected(1, 2, RejectKind.FAILED, "not needed"), 130.0)
    room.on_worker_gone(D, "was lost", 130.0)
    assert host.avoided[-1] == frozenset()


def test_a_start_message_without_a_receipt_is_repeated_while_the_loop_is_in_a_long_forward() -> None:
    slow = record("d", role=Role.DECODE, load=WorkerLoad(since_turn_s=20.0))
    host, room = started(placed(slow, None))
    key = RetransmitKey(slow.mailbox, 1, 0, "decode")
    host.pending.clear()
    room.on_given_up(key, 15.0)
    assert (room.request.epoch, set(host.pending)) == (0, {key})
    host, room = started(ALONE)
    room.on_given_up(key, 15.0)
    assert (room.request.epoch, host.causes) == (1, [RestartCause.SILENT])


def test_a_worker_is_waited_for_but_not_for_ever() -> None:
    host, room = started(None)
    room.tick(4.9)
    assert not room.done
    room.tick(5.1)
    assert isinstance(host.error, Unavailable)


def test_a_room_looks_for_a_worker_when_told_of_others_and_else_seldom() -> None:
    host, room = started(None, None, PAIR)
    room.tick(1.9)
    assert len(host.avoided) == 1
    room.tick(2.0)
    assert len(host.avoided) == 2
    room.on_workers_changed(2.1)
    assert len(host.of(Decode)) == 1
    room.on_workers_changed(2.2)
    assert len(host.avoided) == 3, "the room has its workers"


def test_other_workers_do_not_cut_the_pause_before_a_restart_short() -> None:
    host, room = started(ALONE, ALONE, None, ALONE)
    for epoch in (0, 1):  # the second restart in a row pauses for 0.1 s
        room.on_rejected(D.mailbox, Rejected(1, epoch, RejectKind.FAILED, "no"), 1.0)
    room.on_workers_changed(1.05)
    assert len(host.avoided) == 2
    room.tick(1.1)
    assert len(host.avoided) == 3
    room.on_workers_changed(1.15)
    assert [message.request.epoch for message in host.of(Decode)] == [0, 1, 2]


def test_a_sink_that_wants_no_more_stops_the_room() -> None:
    host, room = started(PAIR)
    host.wanted = 2
    assert room.on_run(D.mailbox, run(0, 5), 0.1) == 1
    assert not room.done
    assert room.on_run(D.mailbox, run(1, 6), 0.2) == 2
    assert room.done
    assert host.of(Abort) == [Abort(1, 0, "stop string")] * 2
    assert (host.tokens, host.booked, host.closed_rooms) == ([5, 6], 0, 1)


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
def test_a_sink_that_cannot_take_tokens_fails_its_room_alone(
    finish: FinishReason | None, caplog: pytest.LogCaptureFixture
) -> None:
    host, room = started(PAIR)
    host.bug = UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
    assert room.on_run(D.mailbox, run(0, 5, finish=finish), 0.1) == 1
    assert isinstance(host.error, RequestFailed)
    assert (room.done, host.booked, host.closed_rooms) == (True, 0, 1)
    assert len(host.of(Abort)) == (2 if finish is None else 0)
    (logged,) = caplog.records
    assert logged.exc_info is not None


def test_stop_tells_both_once() -> None:
    host, room = started(PAIR)
    room.on_run(P.mailbox, run(0, 5), 0.1)
    room.stop("client gone")
    room.stop("client gone")
    assert host.of(Abort) == [Abort(1, 0, "client gone")] * 2
    assert {key.to for key in host.pending} == {P.mailbox, D.mailbox}
    assert (room.done, host.booked, host.closed_rooms, host.error) == (True, 0, 1, None)


def test_every_rejection_that_starts_a_room_again_is_a_cause() -> None:
    ends = {RejectKind.INVALID, RejectKind.CLAIMED}
    assert {RestartCause(kind).value for kind in RejectKind if kind not in ends} <= set(RestartCause)


def test_a_claimed_room_asks_for_all_and_counts_on_after_the_epochs_of_others() -> None:
    host, _ = started(placed(E, None))
    request = GenerateRequest(
        request_id="r", room=2, epoch=0, prompt=b"\0\0\0\0", sampling=SamplingParams(max_new_tokens=4)
    )
    room = RoomStream(request, PlacementRequest(1, as_hashes([]), 4.0), host, host, host, OPTIONS)
    room.take_over(placed(D, None), 3, 1003, 0.0)
    assert host.said[-1] == Resend(2, 3, 0)
    room.on_run(D.mailbox, TokenRun(2, 3, 0, [7]), 0.1)
    assert host.tokens == [7]
    next_one = room.next_epoch()
    assert (next_one.epoch, next_one.forced) == (1004, (7,))
