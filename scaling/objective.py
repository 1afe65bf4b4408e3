"""ObjectiveScaler: a role's number of workers, from its demand, with hysteresis."""

from __future__ import annotations

import math
from collections import deque

from scaling.demand import Demand
from scaling.sample import Samples

_GAP_S = 60.0
"""Without samples for so long, several periods, it is not known how many workers were enough."""


class ObjectiveScaler:
    """It adds workers at once, as a new one takes `start_s` seconds until it serves. It removes workers when
    fewer have been enough for `hold_s` seconds, in which it was never without samples for long."""

    def __init__(self, demand: Demand, start_s: float, hold_s: float) -> None:
        self._demand = demand
        self._start_s = start_s
        self._hold_s = hold_s
        self._wanted: deque[tuple[float, int]] = deque()  # (when, workers)
        self._since = self._last = -math.inf

    def target(self, samples: Samples, now: float, current: int) -> int:
        """The workers to have, at least 1. `current` counts those that are starting, too."""
        if now - self._last > _GAP_S:
            self._since = now
        self._last = now
        self._demand.observe(samples, now)
        needed = max(self._demand.workers(0.0), self._demand.workers(self._start_s))
        wanted = max(1, math.ceil(needed))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._hold_s:
            self._wanted.popleft()
        if wanted >= current or now < self._since + self._hold_s:
            return max(wanted, current)
        return min(current, max(workers for _, workers in self._wanted))
