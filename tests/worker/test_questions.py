"""Questions to the other worker of a room: repeated, asked anew, and given up only in silence."""

from __future__ import annotations

from wire.messages.any_message import AnyMessage
from wire.messages.transfer import KVReady
from wire.peer_monitors import PeerState
from worker.outbox import OutputKey
from worker.questions import Questions

KEY = OutputKey(1, 0)


class Asked:
    """Questions with a clock of the test's own."""

    def __init__(self, timeout_s: float) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, str, AnyMessage]] = []
        self.lost: list[tuple[OutputKey, str]] = []
        self.questions = Questions(lambda to, message: self.sent.append((self.now, to, message)), timeout_s)
        self.questions.ask("tcp://p", KVReady(*KEY), 0.0)

    def until(self, end: float, answered: bool) -> list[float]:
        """Let time pass. Returns when something was sent; with `answered` each question has its answer."""
        before = len(self.sent)
        while self.now < end:
            self.now += 0.25
            sent = len(self.sent)
            self.lost += self.questions.tick(self.now)
            if answered and len(self.sent) > sent:
                self.questions.answered(KEY, "tcp://p", self.now)
        return [at for at, _, _ in self.sent[before:]]


def test_a_question_without_an_answer_is_repeated_and_given_up() -> None:
    asked = Asked(timeout_s=10.0)
    assert asked.sent == [(0.0, "tcp://p", KVReady(1, 0))]
    assert asked.until(9.75, answered=False) == [0.25, 0.75, 1.75, 3.75, 5.75, 7.75, 9.75]
    assert asked.lost == []
    assert asked.questions.waits_for(KEY) == "tcp://p"
    asked.until(10.0, answered=False)
    assert asked.lost == [(KEY, "tcp://p")]
    assert asked.until(60.0, answered=False) == []
    assert asked.questions.waits_for(KEY) == ""


def test_a_peer_that_answers_is_never_given_up_and_asked_ever_more_rarely() -> None:
    asked = Asked(timeout_s=1.0)
    asked.questions.answered(KEY, "tcp://p", 0.0)
    assert asked.until(40.0, answered=True) == [1.0, 3.0, 7.0, 15.0, 23.0, 31.0, 39.0]
    assert asked.lost == []
    assert asked.until(48.25, answered=False) == [47.0, 47.5]
    assert asked.lost == [(KEY, "tcp://p")]


def test_a_peer_that_is_down_is_given_up_at_once_and_asked_again_when_it_is_up() -> None:
    asked = Asked(timeout_s=100.0)
    asked.questions.answered(KEY, "tcp://p", 0.0)
    asked.questions.on_peer("tcp://other", PeerState.DOWN, asked.now)
    asked.until(1.0, answered=True)
    assert asked.lost == []
    asked.questions.on_peer("tcp://p", PeerState.DOWN, asked.now)
    asked.until(1.25, answered=True)
    assert asked.lost == [(KEY, "tcp://p")]
    asked.questions.ask("tcp://p", KVReady(*KEY), asked.now)
    asked.until(1.5, answered=False)
    assert len(asked.lost) == 1, "it may be connecting"
    asked.until(1.75, answered=False)
    assert asked.lost == [(KEY, "tcp://p")] * 2, "it is still down"
    asked.questions.ask("tcp://p", KVReady(*KEY), asked.now)
    asked.questions.on_peer("tcp://p", PeerState.UP, asked.now)
    asked.until(60.0, answered=True)
    assert len(asked.lost) == 2


def test_only_the_peer_that_was_asked_can_answer_and_an_end_is_an_end() -> None:
    asked = Asked(timeout_s=1.0)
    asked.questions.answered(KEY, "tcp://someone", 0.0)
    asked.until(1.0, answered=False)
    assert asked.lost == [(KEY, "tcp://p")]
    asked = Asked(timeout_s=1.0)
    asked.questions.end(KEY)
    asked.questions.end(KEY)
    assert (asked.until(9.0, answered=False), asked.lost) == ([], [])
