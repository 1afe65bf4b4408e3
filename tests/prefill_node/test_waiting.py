"""A room waits for the other worker as long as that one answers, however long its queue is, and no longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hand_off import FakeMailbox, Pair, held, pair, prompt_of, right
from wire.messages.base import Receipt, kind_of
from wire.messages.rooms import Abort, Decode, Prefill, Rejected, RejectKind, Resend, RoomStatus
from wire.messages.transfer import KVDone, KVFailed, KVReady, KVTarget
from wire.peer_monitors import PeerState
from wire.stages import RequestStage
from worker.loop import Worker

LIMIT_S = 5.0  # hand_off_timeout_s


@pytest.fixture
def both() -> Iterator[Pair]:
    """A decode worker with memory for one of the rooms below at a time."""
    with pair(max_total_tokens=256, hand_off_timeout_s=LIMIT_S) as workers:
        yield workers


def wait(both: Pair, seconds: float) -> None:
    """Let time pass in small steps; all mail arrives."""
    for _ in range(int(seconds)):
        both.pass_time(1.0)
        both.run_dry()


def status(both: Pair, worker: Worker, room: int) -> RoomStatus:
    """What a worker answers to a router that asks for more."""
    output = both.outputs[room]
    both.post(worker, Resend(room, output.request.epoch, len(output.tokens)))
    seen = len(output.statuses)
    both.run_dry()
    (answer,) = output.statuses[seen:]
    return answer


def hold_decode(both: Pair, room: int, length: int) -> None:
    """A room takes the memory of decode, and nobody computes its prompt yet."""
    both.ask(room, prompt_of(room, length), 6)
    both.network.letters = [one for one in both.network.letters if not isinstance(one.message, Prefill)]
    both.run_dry()


def start_prefill(both: Pair, room: int) -> None:
    both.post(both.prefill, Prefill(both.outputs[room].request, both.decode.record().mailbox))
    both.run_dry()


def test_rooms_behind_a_full_decode_worker_wait_for_many_times_the_limit(both: Pair) -> None:
    hold_decode(both, 1, 150)
    for room in (2, 3):
        both.ask(room, prompt_of(room, 120), 6)
    both.run_dry()
    wait(both, LIMIT_S - 1)  # of room 1 prefill knows nothing yet: it says so, and only for that long
    for _ in range(4):
        start_prefill(both, 1)  # changes nothing after the first
    wait(both, 10 * LIMIT_S)
    assert all(both.outputs[room].rejected is None for room in (1, 2, 3))
    for room in (1, 2, 3):
        assert both.outputs[room].tokens == right(both, room)
    both.settle()


def test_a_worker_says_where_a_room_is_and_for_whom_it_waits(both: Pair) -> None:
    prefill, decode = both.prefill.record().mailbox, both.decode.record().mailbox
    hold_decode(both, 1, 150)
    for room in (2, 3):
        both.ask(room, prompt_of(room, 120), 6)
    both.run_dry()
    assert status(both, both.decode, 1) == RoomStatus(1, 1, RequestStage.DECODE_WAITING, 0, prefill)
    assert status(both, both.decode, 2) == RoomStatus(2, 1, RequestStage.DECODE_BOOTSTRAP, 0)
    assert status(both, both.decode, 3) == RoomStatus(3, 1, RequestStage.DECODE_BOOTSTRAP, 1)
    assert status(both, both.prefill, 3) == RoomStatus(3, 1, RequestStage.PREFILL_BOOTSTRAP, 0, decode)
    start_prefill(both, 1)
    wait(both, 2)
    assert all(both.outputs[room].tokens == right(both, room) for room in (1, 2, 3))
    both.settle()


def test_a_worker_says_that_it_does_not_run_a_room(both: Pair) -> None:
    for worker in (both.prefill, both.decode):
        both.post(worker, Resend(9, 1, 0))
        both.deliver(0)
        (answer,) = (letter.message for letter in both.network.letters)
        assert isinstance(answer, Rejected)
        assert answer.why is RejectKind.UNKNOWN
        both.network.letters.clear()


def test_a_prompt_in_a_queue_has_its_place() -> None:
    with pair(chunked_prefill_size=4, hand_off_timeout_s=LIMIT_S) as both:
        for room in (1, 2, 3):
            both.ask(room, prompt_of(room, 60), 6)
        for _ in range(6):
            both.deliver(0)
        before = len(both.outputs[3].statuses)
        both.post(both.prefill, Resend(3, 1, 0))
        both.deliver(len(both.network.letters) - 1)
        both.run_dry()
        (answer,) = both.outputs[3].statuses[before:]
        assert answer == RoomStatus(3, 1, RequestStage.PREFILL_WAITING, 1)
        assert both.outputs[3].tokens == right(both, 3)
        both.settle()


def test_decode_blames_a_prefill_worker_that_answers_nothing(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 6)
    for _ in range(int(LIMIT_S) + 1):
        both.run_dry_without(both.prefill)
        both.clock.now += 1.0
        both.turn(both.decode)
    both.run_dry_without(both.prefill)
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert (rejected.why, rejected.blamed) == (RejectKind.FAILED, both.prefill.record().mailbox)
    assert not both.decode.rooms()
    both.insist(1)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_prefill_blames_a_decode_worker_that_answers_nothing(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 6)
    for _ in range(int(LIMIT_S) + 2):
        both.run_dry_without(both.decode)
        both.clock.now += 1.0
        both.turn(both.prefill)
    both.run_dry_without(both.decode)
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert (rejected.why, rejected.blamed) == (RejectKind.FAILED, both.decode.record().mailbox)
    assert not both.prefill.rooms()
    both.insist(1)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_that_is_down_is_blamed_at_once(both: Pair, side: str) -> None:
    """Both say so, and the router sees that the pair is broken. It hears both of them."""
    asker, peer = (both.decode, both.prefill) if side == "prefill" else (both.prefill, both.decode)
    both.ask(1, prompt_of(1, 50), 6)
    both.run_dry_without(peer)
    mailbox = asker.parts.services.mailbox
    assert isinstance(mailbox, FakeMailbox)
    mailbox.peers[peer.record().mailbox] = PeerState.DOWN
    both.clock.now += 0.75
    both.turn(asker)
    both.run_dry_without(peer)
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert (rejected.why, rejected.blamed) == (RejectKind.FAILED, peer.record().mailbox)
    assert not asker.rooms()
    both.insist(1)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_a_target_for_which_no_prompt_comes_is_answered_in_the_end(both: Pair) -> None:
    """Decode would wait for ever: each of its questions is taken, and the room never starts on prefill."""
    hold_decode(both, 1, 50)
    wait(both, LIMIT_S + 1)
    rejected = both.outputs[1].rejected
    assert rejected is not None
    assert "prefill was not asked to compute this room" in rejected.message
    both.insist(1)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_prefill_is_told_that_a_room_is_over_on_decode(both: Pair) -> None:
    """The router's Abort to prefill is lost for good: decode's answer ends the room."""
    hold_decode(both, 1, 150)
    both.ask(2, prompt_of(2, 120), 6)
    both.run_dry()
    both.abort(2)
    del both.network.letters[-2]  # the one to prefill
    both.run_dry()
    assert [room.room for room in both.prefill.rooms()] == [2]
    wait(both, 2)
    assert not both.prefill.rooms()
    assert held(both.prefill) == {}
    both.abort(1)
    both.run_dry()
    both.settle()


def test_decode_is_told_that_a_room_is_over_on_prefill(both: Pair) -> None:
    """Decode's room hears nothing of its end but the answer to its own question."""
    both.ask(1, prompt_of(1, 50), 6)
    target = both.hold_back(KVTarget)
    both.abort(1)
    del both.network.letters[-1]  # the one to decode
    both.run_dry()
    assert [room.room for room in both.decode.rooms()] == [1]
    both.arrive(target)
    both.run_dry()
    assert not both.decode.rooms()
    both.settle()


def test_decode_is_told_that_prefill_cannot_write_to_its_pages() -> None:
    with pair(prefill_differs={"page_size": 8}) as both:
        both.ask(1, prompt_of(1, 30), 5)
        failed = both.hold_back(KVFailed)
        assert failed.to == both.decode.record().mailbox
        assert len(both.decode.rooms()) == 1
        both.arrive(failed)
        assert not both.decode.rooms()
        both.settle()


def test_prefill_confirms_a_target_before_the_prompt_is_computed(both: Pair) -> None:
    """A prompt may take long, and decode would take the silence for death."""
    both.ask(1, prompt_of(1, 150), 6)
    target = both.hold_back(KVTarget)
    both.arrive(target)
    assert not both.outputs[1].tokens
    confirmed = (target.to, target.sender, Receipt(1, 1, kind_of(target.message)))
    assert confirmed in both.network.letters
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_a_lost_ready_or_target_is_repeated(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 6)
    late = [one for one in both.network.letters if isinstance(one.message, Decode)]
    both.network.letters = [one for one in both.network.letters if one not in late]
    both.run_dry()
    both.pass_time(0.5)
    assert [type(one.message) for one in both.network.letters] == [KVReady], "decode did not know the room"
    both.run_dry()
    both.network.letters += late
    both.hold_back(KVTarget)
    wait(both, 1)
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_late_messages_of_an_older_epoch_change_nothing_on_prefill(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 6)
    stale = both.hold_back(KVTarget)
    both.restart(1, split=True)
    target = both.hold_back(KVTarget)
    both.run_dry()
    (room,) = both.prefill.rooms()
    assert (room.epoch, room.hold) == (2, "parked")
    both.arrive(stale)
    both.post(both.prefill, Abort(1, 1, "late"))
    both.run_dry()
    assert both.prefill.rooms() == [room]
    assert room.hold == "parked"
    both.arrive(target)
    both.run_dry()
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_a_target_that_crosses_the_end_of_the_room_does_not_make_it_fail(both: Pair) -> None:
    both.ask(1, prompt_of(1, 50), 6)
    target = both.hold_back(KVTarget)
    both.network.letters.append(target)
    both.hold_back(KVDone)  # it is lost
    both.network.letters.append(target)
    both.run_dry()
    assert both.outputs[1].rejected is None
    wait(both, 1)
    assert both.outputs[1].tokens == right(both, 1)
    both.settle()


def test_a_message_to_a_worker_that_is_down_keeps_no_worker_from_leaving(both: Pair) -> None:
    """Of a role that changes, too: a decode worker is wanted when one has died."""
    both.ask(1, prompt_of(1, 50), 6)
    both.hold_back(KVDone)
    both.run_dry_without(both.decode)
    assert not both.prefill.rooms()
    both.prefill.drain(0.0)
    both.pass_time(0.5)
    assert not both.prefill.drain(0.0), "decode may want to hear that its pages have landed"
    mailbox = both.prefill.parts.services.mailbox
    assert isinstance(mailbox, FakeMailbox)
    mailbox.peers[both.decode.record().mailbox] = PeerState.DOWN
    both.turn(both.prefill)
    both.clock.now += 0.5
    both.turn(both.prefill)
    assert both.prefill.drain(0.0)
