"""ReadLane: the mover's lane of reads from storage, and whether it stands still."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache.tiers.mover import Done, Work, WorkQueue


class ReadLane:
    """One worker's. All methods are called on the tree's thread. The lane's work is done in order: what is
    submitted while it stands still waits for all that is before it."""

    def __init__(self, mover: WorkQueue, clock: Callable[[], float]) -> None:
        self._mover = mover
        self._clock = clock
        self._bounds: deque[float] = deque()  # seconds that each work should take at most, the oldest first
        self._since = 0.0  # when the oldest became that

    def submit(self, bound_s: float, work: Work, done: Done) -> None:
        """See WorkQueue. The work should take at most `bound_s` seconds."""
        if not self._bounds:
            self._since = self._clock()
        self._bounds.append(bound_s)

        def ended(told: Any) -> None:
            self._bounds.popleft()
            self._since = self._clock()
            done(told)

        self._mover.submit("reads", work, ended)

    @property
    def stands(self) -> bool:
        """Whether the oldest work takes longer than it should."""
        return bool(self._bounds) and self._clock() - self._since >= self._bounds[0]
