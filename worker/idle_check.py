"""IdleCheck: a worker that has nothing to do checks now and then that its memory balances.

A page that is lost or has two owners shows as wrong tokens or as too little memory, long after the request
that caused it. The check walks the whole tree, so it never runs between two forwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_QUIET_S = 1.0  # without work, before the check: requests often come in groups
_SHARE = 0.01  # of the time at most, however large the tree: 5 us a node


class IdleCheck:
    """Runs `check` when the worker has been idle for a while, at most every `interval_s`."""

    def __init__(self, check: Callable[[], object], interval_s: float) -> None:
        """`check` raises when something is wrong. What it raises leaves `turn`."""
        self._check = check
        self.running = False  # now; the larger the tree, the longer it takes
        self._interval_s = interval_s
        self._quiet_from = float("inf")
        self._due_at = 0.0

    def turn(self, idle: bool, now: float) -> None:
        """A turn of the loop is over; `idle`: nothing was done in it, and nothing waits to be computed."""
        if not idle:
            self._quiet_from = float("inf")
            return
        self._quiet_from = min(self._quiet_from, now)
        if now < self._due_at or now - self._quiet_from < _QUIET_S:
            return
        started = time.perf_counter()
        self.running = True
        self._check()
        self.running = False
        took_s = time.perf_counter() - started
        self._due_at = now + max(self._interval_s, took_s / _SHARE)
