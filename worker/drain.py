"""Drain: a worker's departure. Another thread begins it, the engine loop carries it out."""

from __future__ import annotations

import math
import threading

_SHARE = 0.8  # of the bound: rooms that still run then are handed back to their routers


class Drain:
    """Begun once, by `begin`; over when the loop calls `finish`. Times are of one monotonic clock.

    Routers learn of it from the worker's record. They move its rooms to other decode workers as soon as these
    have memory (docs/decisions/0025-moves.md).
    """

    def __init__(self) -> None:
        self.begun = False
        self._hand_back_at = math.inf
        self._over = threading.Event()

    def begin(self, now: float, bound_s: float) -> None:
        """From now on the worker starts no room. It should be empty within `bound_s`."""
        self._hand_back_at = now + _SHARE * bound_s
        self.begun = True

    def must_hand_back(self, now: float) -> bool:
        """Whether the rooms that still run can no longer be waited for."""
        return now >= self._hand_back_at

    def finish(self) -> None:
        """The worker is empty, or its loop has ended."""
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for `finish`. Whether it was called in time."""
        return self._over.wait(timeout_s)
