"""The repeater says things until they are answered, and no longer than its bound."""

from __future__ import annotations

from wire.messages import Abort, AnyMessage
from wire.repeater import Repeater, RepeatKey


def test_repeats_with_growing_intervals_until_answered() -> None:
    sent: list[tuple[str, AnyMessage]] = []
    repeater = Repeater(lambda to, message: sent.append((to, message)), first_interval_s=1.0)
    key = RepeatKey("tcp://peer", 7, 1, "abort")
    repeater.say(key, Abort(7, 1), now=0.0, timeout_s=100.0)
    assert len(sent) == 1
    assert repeater.tick(0.5) == []
    assert len(sent) == 1
    repeater.tick(1.0)
    assert len(sent) == 2
    repeater.tick(2.0)
    assert len(sent) == 2, "the second interval is twice the first"
    repeater.tick(3.0)
    assert len(sent) == 3
    assert repeater.answered(key)
    assert not repeater.answered(key), "a repeated answer is harmless"
    repeater.tick(50.0)
    assert len(sent) == 3


def test_gives_up_at_the_deadline_and_says_so() -> None:
    repeater = Repeater(lambda to, message: None)
    key = RepeatKey("tcp://peer", 7, 1, "abort")
    repeater.say(key, Abort(7, 1), now=0.0, timeout_s=5.0)
    assert repeater.tick(4.9) == []
    assert repeater.tick(5.0) == [key]
    assert len(repeater) == 0


def test_forget_room_spares_other_epochs() -> None:
    repeater = Repeater(lambda to, message: None)
    for epoch in (1, 2):
        repeater.say(RepeatKey("tcp://peer", 7, epoch, "abort"), Abort(7, epoch), now=0.0, timeout_s=5.0)
    repeater.forget_room(7, 1)
    assert repeater.tick(9.0) == [RepeatKey("tcp://peer", 7, 2, "abort")]
