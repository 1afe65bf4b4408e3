"""What a worker's parts hold, until when, and what is counted when nobody comes for it."""

from __future__ import annotations

from wire.holds import Hold
from wire.messages.base import Receipt
from wire.request import FinishReason, OutputDelta
from wire.retransmitter import RetransmitKey, Retransmitter
from worker.outbox import Outbox, OutputKey
from worker.rooms import Rooms


def test_a_parked_message_is_held_until_its_room_starts_or_its_lease_ends() -> None:
    rooms: Rooms[OutputKey] = Rooms(tombstone_s=20.0, parking_s=10.0)
    rooms.park(1, 0, "tcp://d", Receipt(1, 0, "x"), now=5.0)
    rooms.park(2, 0, "tcp://d", Receipt(2, 0, "x"), now=5.0)
    rooms.unpark(2, 0)
    assert rooms.parked("p", now=8.0) == [Hold("p", "parked message", "tcp://d", 1, 0, 3.0, 7.0)]
    assert rooms.swept == 0
    rooms.take_unclaimed(now=15.0)
    assert rooms.parked("p", now=15.0) == []
    assert rooms.swept == 1


def test_complete_output_is_held_until_it_is_acknowledged_or_its_lease_ends() -> None:
    outbox = Outbox("d", lambda *_: None, lease_s=60.0)
    for room in (1, 2):
        delta = OutputDelta([5], finish=FinishReason.LENGTH)
        outbox.push("tcp://r", OutputKey(room, 0), 0, delta, 0)
        assert outbox.unacknowledged(now=0.0) == [], "the room runs"
        outbox.retire(OutputKey(room, 0), now=10.0)
        if room == 1:
            assert outbox.unacknowledged(now=12.0) == [Hold("d", "output", "tcp://r", 1, 0, 2.0, 58.0)]
            outbox.ack("tcp://r", [(1, 0, 1)])
    assert outbox.swept == 0
    outbox.sweep(now=70.0)
    assert outbox.unacknowledged(now=70.0) == []
    assert outbox.swept == 1


def test_a_repeated_message_is_held_until_it_is_answered_or_given_up() -> None:
    retransmitter = Retransmitter(lambda *_: None)
    key, other = (RetransmitKey("tcp://r", room, 0, "rejected") for room in (1, 2))
    retransmitter.say(key, Receipt(1, 0, "x"), now=0.0, timeout_s=10.0)
    retransmitter.say(other, Receipt(2, 0, "x"), now=0.0, timeout_s=10.0)
    retransmitter.answered(other)
    assert retransmitter.unanswered("d", now=4.0) == [
        Hold("d", "message, rejected", "tcp://r", 1, 0, 4.0, 6.0)
    ]
    assert retransmitter.swept == 0
    assert retransmitter.tick(now=10.0) == [key]
    assert retransmitter.swept == 1
