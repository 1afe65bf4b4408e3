"""EventOrdering: puts a publisher's numbered batches in order, and notices missing or different ones.

Batches come on two ways. Live batches may be lost. Replays are answers to requests; each is complete and in
order, unless the publisher's queue overflowed. A replay is requested from the last batch that was applied,
not from the next one: that batch comes again and must be the same. So a publisher that was restarted at the
same address is noticed, whatever its numbers are: it lacks the batch, or has another one under its number.

At most one replay is under way. It ends with its end marker, or is abandoned with its connection. So the
first batch of a replay can be compared with what was requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple


class Verdict(Enum):
    """What to do with the batches of a step."""

    APPLY = auto()
    REPLACE = auto()  # earlier batches are lost: forget everything, then apply these
    START_OVER = (
        auto()
    )  # it is another stream, or a broken replay: forget everything, use a new EventOrdering


class OrderingStep(NamedTuple):
    """Batches to apply now, in order."""

    batches: Sequence[bytes]
    verdict: Verdict = Verdict.APPLY


class _Replay(Enum):
    NONE = auto()
    REQUESTED = auto()  # nothing of it has come
    CONTINUES = auto()  # it continues what was applied
    REPLACES = auto()  # it began later than requested; live batches wait until it ends
    STALE = auto()  # it was requested before `distrust`: it may continue another stream than what was applied


_NOTHING = OrderingStep(())


class EventOrdering:
    """The batches of one publisher, numbered from 0."""

    def __init__(self) -> None:
        self.expected = 0  # the next number to apply
        self.distrusted = False  # live batches may be of another stream, and are ignored until a replay
        self._early: dict[int, bytes] = {}  # batches that came before an earlier one
        self._last_live = -1  # the last live number of this connection; these numbers only rise
        self._last_batch: bytes | None = (
            None  # what was applied as `expected - 1`; None: a part of a snapshot
        )
        self._replay = _Replay.NONE
        self._start = 0  # of the replay under way: its first number ...
        self._start_batch: bytes | None = None  # ... what was applied under that number ...
        self._requested_when_empty = True  # ... whether nothing had been applied ...
        self._settles_distrust = False  # ... and whether it was requested after the last `distrust`

    @property
    def gap(self) -> bool:
        """Batches are missing, and no replay is under way."""
        return bool(self._early) and self._replay is _Replay.NONE

    @property
    def replaying(self) -> bool:
        """A replay was requested and has not ended."""
        return self._replay is not _Replay.NONE

    def request_replay(self) -> int:
        """Begin a replay. Returns the number from which to request it."""
        assert self._replay is _Replay.NONE, "one replay at a time"
        self._replay = _Replay.REQUESTED
        self._start, self._start_batch = max(0, self.expected - 1), self._last_batch
        self._requested_when_empty, self._settles_distrust = self.expected == 0, self.distrusted
        return self._start

    def abandon_replay(self) -> Verdict:
        """No more of the replay will come."""
        broken = self._replay is _Replay.REPLACES
        self._replay = _Replay.NONE
        return Verdict.START_OVER if broken else Verdict.APPLY

    def distrust(self) -> None:
        """The next live batch may be of another stream, whatever its number.

        Call it after a new connection. Live batches are ignored until a replay that is requested later ends.
        """
        self.distrusted = True
        self._settles_distrust = False
        self._early.clear()
        self._last_live = -1
        if self._replay in (_Replay.REQUESTED, _Replay.CONTINUES):
            self._replay = _Replay.STALE

    def live(self, number: int, batch: bytes) -> Sequence[bytes]:
        """Take a live batch. Returns the batches to apply now, in order."""
        if self.distrusted:
            return ()
        if number <= self._last_live:
            self.distrust()
            return ()
        self._last_live = number
        if number == self.expected and not self._early and self._replay is not _Replay.REPLACES:
            self.expected, self._last_batch = number + 1, batch
            return (batch,)
        if number < self.expected:
            return ()  # a replay brought it earlier
        self._early[number] = batch
        return () if self._replay is _Replay.REPLACES else self._in_order()

    def replayed(self, number: int, batch: bytes) -> OrderingStep:
        """Take a batch of the replay."""
        if self._replay is _Replay.REQUESTED:
            if number > self._start:
                self._replay, self.expected = _Replay.REPLACES, number
                return self._replace(number, Verdict.REPLACE, batch)
            if number == self._start and self._differs(batch):
                return OrderingStep((), Verdict.START_OVER)
            self._replay = _Replay.CONTINUES
        if self._replay is _Replay.REPLACES:
            return self._replace(number, Verdict.APPLY, batch)
        if self._replay in (_Replay.NONE, _Replay.STALE) or number < self.expected:
            return _NOTHING
        self._early[number] = batch
        return OrderingStep(self._in_order())

    def replay_ended(self) -> OrderingStep:
        """Take the replay's end marker."""
        replay, self._replay = self._replay, _Replay.NONE
        if replay is _Replay.NONE:
            return _NOTHING
        if replay is _Replay.REQUESTED and not self._requested_when_empty:
            return OrderingStep((), Verdict.START_OVER)  # the publisher lacks what was applied
        if self._settles_distrust:
            self.distrusted = False
        if replay is _Replay.REPLACES:
            self._early = {number: batch for number, batch in self._early.items() if number >= self.expected}
        return OrderingStep(self._in_order())

    def skip_gap(self) -> Sequence[bytes]:
        """Give up the missing batches. Forget everything, then apply what this returns."""
        self._replay = _Replay.NONE
        self.expected = min(self._early, default=self.expected)
        return self._in_order()

    def _differs(self, batch: bytes) -> bool:
        """Whether this is, or may be, another batch than the one applied under its number."""
        if self._start_batch is None:
            return self._settles_distrust and not self._requested_when_empty
        return self._start_batch != batch

    def _replace(self, number: int, verdict: Verdict, batch: bytes) -> OrderingStep:
        """A batch of a replay that began later than requested.

        Live batches with its numbers may differ from it, because a snapshot takes as many numbers as it has
        batches.
        """
        if number != self.expected:
            return OrderingStep((), Verdict.START_OVER)
        self.expected, self._last_batch = number + 1, None
        return OrderingStep((batch,), verdict)

    def _in_order(self) -> list[bytes]:
        ready = []
        while (batch := self._early.pop(self.expected, None)) is not None:
            ready.append(batch)
            self.expected += 1
            self._last_batch = batch
        return ready
