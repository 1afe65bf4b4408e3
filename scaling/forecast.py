"""Forecast: the rate of a work that arrives, now and a while ahead.

A line is fitted to the rates of the last minutes, and newer ones weigh more.

A seasonal model (the same hour of yesterday) was not chosen: it needs days of history, which a controller
that restarts does not have.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 300.0
MEMORY_S = 120.0
_FEWEST = 4  # observations for a line; with fewer the mean is used


class Forecast:
    """Rates per second."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        """The weight of an observation falls by e in `memory_s` seconds."""
        self._memory_s = memory_s
        self._seen: deque[tuple[float, float, float]] = deque()  # (when, seconds, rate)
        self._last: float | None = None

    def observe(self, amount: float, now: float) -> None:
        """`amount` arrived since the last call. The first call begins to count, and its amount is ignored."""
        if self._last is not None and now > self._last:
            seconds = now - self._last
            self._seen.append((now - seconds / 2, seconds, amount / seconds))
        self._last = now
        while self._seen and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()

    def rate(self, ahead_s: float) -> float:
        """The rate `ahead_s` seconds after the last observation; 0 before there is one.

        It is never expected to fall: a line that falls is extended to now, not further.
        """
        if not self._seen or self._last is None:
            return 0.0
        weights = [seconds * math.exp((at - self._last) / self._memory_s) for at, seconds, _ in self._seen]
        total = sum(weights)
        weights = [weight / total for weight in weights]
        mean = sum(w * rate for w, (_, _, rate) in zip(weights, self._seen, strict=True))
        if len(self._seen) < _FEWEST:
            return mean
        centre = sum(w * at for w, (at, _, _) in zip(weights, self._seen, strict=True))
        points = [(w, at - centre, rate - mean) for w, (at, _, rate) in zip(weights, self._seen, strict=True)]
        spread = sum(w * x * x for w, x, _ in points)
        slope = sum(w * x * y for w, x, y in points) / spread
        x_wanted = self._last + (ahead_s if slope > 0 else 0.0) - centre
        return max(0.0, mean + slope * x_wanted)
