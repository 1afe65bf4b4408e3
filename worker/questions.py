"""Questions: what a worker asks the other worker of a room, again and again until its wait is over.

A room may wait for the other worker as long as that one answers, because its queue may be long. So no
question has an end of its own: each is repeated until it is answered, and asked anew later, at growing
intervals. A worker that has lost the room says so, and one that is dead says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wire.messages.any_message import AnyMessage
from wire.messages.transfer import KVReady, KVTarget
from wire.peer_monitors import PeerState
from worker.outbox import OutputKey

_REPEAT_S = 0.25, 2.0  # the first and the longest interval without an answer
_ANEW_S = 1.0, 8.0  # the first and the longest interval after an answer
_CONNECT_S = 0.5  # for a peer that is down: asking is what connects to it again
_DOWN_S = 60.0  # a peer that went down longer ago is reported again if it is asked


@dataclass(slots=True)
class _Question:
    peer: str
    message: KVTarget | KVReady
    asked_at: float
    unheard_since: float | None  # None: answered
    next_at: float
    repeat_s: float = _REPEAT_S[0]
    anew_s: float = _ANEW_S[0]


class Questions:
    """At most one question for each room and epoch. Engine loop only; time is passed in."""

    def __init__(self, send: Callable[[str, AnyMessage], None], timeout_s: float) -> None:
        """A peer that does not answer for `timeout_s` has lost the room."""
        self._send = send
        self._timeout_s = timeout_s
        self._questions: dict[OutputKey, _Question] = {}
        self._down: dict[str, float] = {}  # mailboxes that went down, and when

    def ask(self, peer: str, message: KVTarget | KVReady, now: float) -> None:
        """Send the message now, and again until `end`."""
        key = OutputKey(message.room, message.epoch)
        self._questions[key] = _Question(peer, message, now, now, now + _REPEAT_S[0])
        self._send(peer, message)

    def answered(self, key: OutputKey, peer: str, now: float) -> None:
        """The peer has the room. It will be asked again, because it may lose it."""
        question = self._questions.get(key)
        if question is not None and question.peer == peer and question.unheard_since is not None:
            question.unheard_since = None
            question.next_at = now + question.anew_s
            question.anew_s = min(2 * question.anew_s, _ANEW_S[1])
            question.repeat_s = _REPEAT_S[0]

    def end(self, key: OutputKey) -> None:
        """The wait is over, whatever ended it. Repeats change nothing."""
        self._questions.pop(key, None)

    def on_peer(self, peer: str, state: PeerState, now: float) -> None:
        """A mailbox has come up or gone down: who waits for one that is down waits no more."""
        if state is PeerState.DOWN:
            self._down[peer] = now
        else:
            self._down.pop(peer, None)

    def waits_for(self, key: OutputKey) -> str:
        """The mailbox of the worker for which the room waits; "" when it waits for none."""
        question = self._questions.get(key)
        return "" if question is None else question.peer

    def tick(self, now: float) -> list[tuple[OutputKey, str]]:
        """Ask what is due. Returns the rooms whose peer is down or does not answer, with its mailbox: their
        questions have ended."""
        for peer in [peer for peer, since in self._down.items() if now - since >= _DOWN_S]:
            del self._down[peer]
        lost = []
        for key, question in list(self._questions.items()):
            since = question.unheard_since
            is_down = question.peer in self._down and now - question.asked_at >= _CONNECT_S
            if is_down or (since is not None and now - since >= self._timeout_s):
                del self._questions[key]
                lost.append((key, question.peer))
            elif now >= question.next_at:
                if question.unheard_since is None:
                    question.unheard_since = now
                question.repeat_s = min(2 * question.repeat_s, _REPEAT_S[1])
                question.next_at = now + question.repeat_s
                self._send(question.peer, question.message)
        return lost
