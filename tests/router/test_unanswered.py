"""Who was asked and has sent nothing since; time is moved by hand."""

from __future__ import annotations

import pytest

from router import unanswered
from router.unanswered import Unanswered
from wire.messages.any_message import AnyMessage
from wire.messages.caches import Inspect
from wire.messages.rooms import Abort, Ack

ABORT = Abort(1, 0)


class Clock:
    """time.monotonic as the test says, and a look every half second of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sent: list[tuple[str, AnyMessage]] = []
        monkeypatch.setattr(unanswered.time, "monotonic", lambda: self.now)
        self.unanswered = Unanswered(lambda to, message: self.sent.append((to, message)))

    def wait(self, seconds: float) -> list[str]:
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            silent = self.unanswered.silent(self.now)
        return silent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_only_questions_need_an_answer(clock: Clock) -> None:
    clock.unanswered.send("a", Ack([(1, 0, 5)]))
    clock.unanswered.send("b", Inspect("load", 1))
    assert clock.sent == [("a", Ack([(1, 0, 5)])), ("b", Inspect("load", 1))]
    assert clock.wait(4.5) == []
    assert clock.wait(1.0) == ["b"]


def test_any_mail_is_an_answer_and_the_next_question_counts_anew(clock: Clock) -> None:
    clock.unanswered.send("a", ABORT)
    clock.wait(4.5)
    clock.unanswered.heard("a")
    clock.unanswered.send("a", ABORT)
    assert clock.wait(4.5) == []
    clock.unanswered.send("a", ABORT)  # a repeat does not begin the wait again
    assert clock.wait(0.5) == ["a"]


def test_a_silent_peer_is_tried_again_after_a_minute(clock: Clock) -> None:
    clock.unanswered.send("a", ABORT)
    assert clock.wait(59.5) == ["a"]
    assert clock.wait(1.0) == []
    clock.unanswered.send("a", ABORT)
    assert clock.wait(5.0) == ["a"]


def test_after_a_pause_of_its_own_a_router_waits_anew(clock: Clock) -> None:
    clock.unanswered.send("a", ABORT)
    clock.now += 30.0
    assert clock.wait(5.0) == []
    assert clock.wait(0.5) == ["a"]
