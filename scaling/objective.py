"""ObjectiveScaler: a role's number of workers, from its demand, with hysteresis."""

from __future__ import annotations

import math
from collections import deque

from scaling.demand import Demand
from scaling.sample import Samples


class ObjectiveScaler:
    """It adds workers at once, as a new one takes `start_s` seconds until it serves. It removes workers when
    fewer have been enough for `hold_s` seconds."""

    def __init__(self, demand: Demand, start_s: float, hold_s: float) -> None:
        self._demand = demand
        self._start_s = start_s
        self._hold_s = hold_s
        self._wanted: deque[tuple[float, int]] = deque()  # (when, workers)
        self._since: float | None = None

    def target(self, samples: Samples, now: float, current: int) -> int:
        """The workers to have, at least 1. `current` counts those that are starting, too."""
        self._since = now if self._since is None else self._since
        self._demand.observe(samples, now)
        needed = max(self._demand.workers(0.0), self._demand.workers(self._start_s))
        wanted = max(1, math.ceil(needed))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._hold_s:
            self._wanted.popleft()
        if wanted >= current or now < self._since + self._hold_s:
            return max(wanted, current)
        return min(current, max(workers for _, workers in self._wanted))
