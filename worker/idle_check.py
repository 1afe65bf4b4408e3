"""IdleCheck: a worker that has nothing to do checks now and then that its memory balances.

A page that is lost or has two owners shows as wrong tokens or as too little memory, long after the request
that caused it. The check walks the whole tree, which takes seconds for a million nodes. So it never runs
between two forwards, and it runs in slices, one in each turn of the loop: a request waits for one slice.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from typing import Protocol

_QUIET_S = 1.0  # without work, before the check: requests often come in groups
_SHARE = 0.01  # of the time at most, however large the tree: 5 us a node


class Balancing(Protocol):
    """What is checked: a Scheduler."""

    def check_slices(self) -> Iterator[None]:
        """The check, with a `yield` after each bounded part. Raises AssertionError."""

    def check_memory(self) -> object:
        """The same in one go."""

    def memory_version(self) -> Hashable:
        """Differs when memory has changed; see Memory.version."""


class IdleCheck:
    """Runs the check when the worker has been idle for a while, at most every `interval_s`."""

    def __init__(self, memory: Balancing, interval_s: float) -> None:
        self.confirming = False  # an imbalance is checked in one go; the larger the tree, the longer it takes
        self._memory = memory
        self._interval_s = interval_s
        self._slices: Iterator[None] | None = None
        self._version: Hashable = None
        self._spent_s = 0.0  # in the slices so far
        self._quiet_from = float("inf")
        self._due_at = 0.0

    @property
    def running(self) -> bool:
        """Whether a check has begun. Then the next turn should follow at once."""
        return self._slices is not None

    def turn(self, idle: bool, now: float) -> None:
        """A turn of the loop is over; `idle`: nothing was done in it, and nothing waits to be computed.

        Raises what the check raises. A check is given up when there is work or memory changes.
        """
        version = self._memory.memory_version() if idle else None
        if version is None or version != self._version:
            self._version = version
            self._quiet_from = now
            if self._slices is not None:
                self._end(now, 0.0)
        elif self._slices is not None:
            self._advance(now)
        elif now >= self._due_at and now - self._quiet_from >= _QUIET_S:
            self._slices, self._spent_s = self._memory.check_slices(), 0.0
            self._advance(now)

    def _advance(self, now: float) -> None:
        assert self._slices is not None, "no check has begun"
        started = time.perf_counter()
        try:
            is_over = next(self._slices, True) is True
        except AssertionError:
            self.confirming = True
            self._memory.check_memory()  # raises, unless memory has changed between two slices
            self.confirming, is_over = False, True
        self._spent_s += time.perf_counter() - started
        if is_over:
            self._end(now, self._interval_s)

    def _end(self, now: float, interval_s: float) -> None:
        self._slices = None
        self._due_at = now + max(interval_s, self._spent_s / _SHARE)
