"""The retransmitter says things until they are answered, and no longer than its bound."""

from __future__ import annotations

from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Abort
from wire.retransmitter import RetransmitKey, Retransmitter


def test_repeats_with_growing_intervals_until_answered() -> None:
    sent: list[tuple[str, AnyMessage]] = []
    retransmitter = Retransmitter(lambda to, message: sent.append((to, message)), first_interval_s=1.0)
    key = RetransmitKey("tcp://peer", 7, 1, "abort")
    retransmitter.say(key, Abort(7, 1), now=0.0, timeout_s=100.0)
    assert len(sent) == 1
    assert retransmitter.tick(0.5) == []
    assert len(sent) == 1
    retransmitter.tick(1.0)
    assert len(sent) == 2
    retransmitter.tick(2.0)
    assert len(sent) == 2, "the second interval is twice the first"
    retransmitter.tick(3.0)
    assert len(sent) == 3
    assert retransmitter.answered(key)
    assert not retransmitter.answered(key), "a repeated answer is harmless"
    retransmitter.tick(50.0)
    assert len(sent) == 3


def test_gives_up_at_the_deadline_and_says_so() -> None:
    retransmitter = Retransmitter(lambda to, message: None)
    key = RetransmitKey("tcp://peer", 7, 1, "abort")
    retransmitter.say(key, Abort(7, 1), now=0.0, timeout_s=5.0)
    assert retransmitter.tick(4.9) == []
    assert retransmitter.tick(5.0) == [key]
    assert len(retransmitter) == 0


def test_forget_room_spares_other_epochs() -> None:
    retransmitter = Retransmitter(lambda to, message: None)
    for epoch in (1, 2):
        retransmitter.say(
            RetransmitKey("tcp://peer", 7, epoch, "abort"), Abort(7, epoch), now=0.0, timeout_s=5.0
        )
    retransmitter.forget_room(7, 1)
    assert retransmitter.tick(9.0) == [RetransmitKey("tcp://peer", 7, 2, "abort")]


def test_what_is_over_leaves_nothing() -> None:
    retransmitter = Retransmitter(lambda to, message: None)
    keys = [RetransmitKey(f"tcp://{to}", room, 1, kind) for to in "ab" for room in range(3) for kind in "xy"]
    for key in keys:
        retransmitter.say(key, Abort(key.room, 1), now=0.0, timeout_s=5.0)
    for key in keys[:3]:
        assert retransmitter.answered(key)
    retransmitter.forget_room(0, 1)
    retransmitter.forget_room(7, 1)
    left = [key for key in keys[3:] if key.room]
    assert len(retransmitter) == len(left)
    assert retransmitter.tick(5.0) == left
    retransmitter.forget_room(1, 1)
    # Private: the keys of rooms that are over show nowhere else.
    assert not retransmitter._by_room


def test_a_slow_peer_hears_it_every_two_seconds() -> None:
    sent: list[str] = []
    retransmitter = Retransmitter(lambda to, message: sent.append(to))
    retransmitter.say(RetransmitKey("tcp://p", 1, 0, "abort"), Abort(1, 0), 0.0, 100.0)
    for tenth in range(300):
        retransmitter.tick(tenth / 10)
    before = len(sent)
    for tenth in range(300, 500):
        retransmitter.tick(tenth / 10)
    assert len(sent) - before in (9, 10)
