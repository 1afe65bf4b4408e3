"""EventOrdering: puts a publisher's numbered batches in order, and notices what is missing or not the same.

Two streams carry them: live ones, of which some may be lost, and replies to what was asked for, each of them
whole and in order (unless the publisher's queue ran over). A reply is asked from the last batch that was
applied, not from the next: it comes again, and must be the same. A publisher that has begun anew at the same
address lacks it, or has another under its number, and is noticed whatever its number is by now.

At most one reply is due at a time; it is over at its end marker, or abandoned with its connection. So what a
reply begins with can be compared with what was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple


class Verdict(Enum):
    """What to do with the batches of a step."""

    FOLLOWS = auto()  # apply them
    REPLACES = auto()  # what came before them is lost: forget all that is known, then apply them
    START_OVER = auto()  # another stream, or a broken reply: forget all, begin with a new repair


class OrderingStep(NamedTuple):
    """Batches that can be applied now, in order, and how."""

    ready: Sequence[bytes]
    verdict: Verdict = Verdict.FOLLOWS


class _Reply(Enum):
    NONE = auto()  # none is due
    DUE = auto()  # nothing of it has come
    REPAIRS = auto()  # it continues what is known
    REPLACES = auto()  # it began later than asked; until it ends, live batches wait
    STALE = auto()  # asked before a doubt: it may continue another stream than what was applied meanwhile


_NOTHING = OrderingStep(())


class EventOrdering:
    """Batches of one publisher, numbered from 0."""

    def __init__(self) -> None:
        self.expected = 0  # the next number to apply
        self.doubtful = False  # live batches may be another stream's: ask, and until then do not listen
        self._early: dict[int, bytes] = {}
        self._heard = -1  # the last number that came live on this connection, where numbers only rise
        self._last: bytes | None = None  # applied under `expected - 1`; None: it came in another form
        self._reply = _Reply.NONE
        self._asked = 0
        self._asked_batch: bytes | None = None
        self._asked_anew = True  # nothing was known when it was asked
        self._asked_in_doubt = False  # of the doubt there is now

    @property
    def gap(self) -> bool:
        """Something was lost on the way, and nobody is repairing it: ask."""
        return bool(self._early) and self._reply is _Reply.NONE

    @property
    def reply_due(self) -> bool:
        """`ask` was called, and that reply has not ended."""
        return self._reply is not _Reply.NONE

    def ask(self) -> int:
        """The number from which to ask for a replay. The reply goes to `replayed`, its end to `ended`."""
        assert self._reply is _Reply.NONE, "one reply at a time"
        self._reply = _Reply.DUE
        self._asked, self._asked_batch = max(0, self.expected - 1), self._last
        self._asked_anew, self._asked_in_doubt = self.expected == 0, self.doubtful
        return self._asked

    def abandon(self) -> Verdict:
        """The reply will not come (further)."""
        broken = self._reply is _Reply.REPLACES
        self._reply = _Reply.NONE
        return Verdict.START_OVER if broken else Verdict.FOLLOWS

    def doubt(self) -> None:
        """The next live batch may be another stream's, whatever its number: the connection was made anew, or
        numbers fell. What came live is forgotten; a reply brings it."""
        self.doubtful = True
        self._asked_in_doubt = False
        self._early.clear()
        self._heard = -1
        if self._reply in (_Reply.DUE, _Reply.REPAIRS):
            self._reply = _Reply.STALE

    def live(self, number: int, payload: bytes) -> Sequence[bytes]:
        """The batches that can be applied now, in order."""
        if self.doubtful:
            return ()
        if number <= self._heard:
            self.doubt()
            return ()
        self._heard = number
        if number == self.expected and not self._early and self._reply is not _Reply.REPLACES:
            self.expected, self._last = number + 1, payload
            return (payload,)
        if number < self.expected:
            return ()  # it is late: a reply on the other socket was quicker
        self._early[number] = payload
        return () if self._reply is _Reply.REPLACES else self._in_order()

    def replayed(self, number: int, payload: bytes) -> OrderingStep:
        """One batch of the reply that is due."""
        if self._reply is _Reply.DUE:
            if number > self._asked:
                self._reply, self.expected = _Reply.REPLACES, number
                return self._replace(number, Verdict.REPLACES, payload)
            if number == self._asked and self._differs(payload):
                return OrderingStep((), Verdict.START_OVER)
            self._reply = _Reply.REPAIRS
        if self._reply is _Reply.REPLACES:
            return self._replace(number, Verdict.FOLLOWS, payload)
        if self._reply in (_Reply.NONE, _Reply.STALE) or number < self.expected:
            return _NOTHING
        self._early[number] = payload
        return OrderingStep(self._in_order())

    def ended(self) -> OrderingStep:
        """The reply's end marker."""
        reply, self._reply = self._reply, _Reply.NONE
        if reply is _Reply.NONE:
            return _NOTHING
        if reply is _Reply.DUE and not self._asked_anew:
            return OrderingStep((), Verdict.START_OVER)  # it does not have what it published
        if self._asked_in_doubt:
            self.doubtful = False
        if reply is _Reply.REPLACES:
            self._early = {n: payload for n, payload in self._early.items() if n >= self.expected}
        return OrderingStep(self._in_order())

    def skip(self) -> Sequence[bytes]:
        """Give up what is missing before the first batch that is there. Forget all that is known before."""
        self._reply = _Reply.NONE
        self.expected = min(self._early, default=self.expected)
        return self._in_order()

    def _differs(self, payload: bytes) -> bool:
        """Is this another batch than the one that was applied last, or may it be?"""
        if self._asked_batch is None:
            return self._asked_in_doubt and not self._asked_anew
        return self._asked_batch != payload

    def _replace(self, number: int, verdict: Verdict, payload: bytes) -> OrderingStep:
        """A batch of a reply that began later than asked. Live ones under its numbers may be other batches: a
        snapshot has as many as it takes."""
        if number != self.expected:
            return OrderingStep((), Verdict.START_OVER)
        self.expected, self._last = number + 1, None
        return OrderingStep((payload,), verdict)

    def _in_order(self) -> list[bytes]:
        ready = []
        while (payload := self._early.pop(self.expected, None)) is not None:
            ready.append(payload)
            self.expected += 1
            self._last = payload
        return ready
