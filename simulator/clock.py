"""Clock: virtual time. Callbacks run one after another, in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls functions when they are due. Those of equal times are called in the order of `at`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function at `when` (seconds), or as soon as possible if that is past."""
        self._asked += 1
        heapq.heappush(self._due, (max(when, self.now), self._asked, call, arguments))

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in `delay` seconds."""
        self.at(self.now + delay, call, *arguments)

    def run(self, until: Callable[[], bool]) -> None:
        """Run until `until()` is true or nothing is due."""
        while self._due and not until():
            self.now, _, call, arguments = heapq.heappop(self._due)
            call(*arguments)
