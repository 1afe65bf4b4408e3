"""PrefillDemand and DecodeDemand: how many workers of a role meet its objective."""

from __future__ import annotations

import math
from typing import Protocol

from scaling.forecast import MEMORY_S, Forecast
from scaling.queueing import fewest, wait_quantile
from scaling.sample import Samples, Totals

SHARE = 0.85
"""Of requests that are to meet the objective while as many workers serve as are needed. A fleet has whole
workers, and mostly some to spare, so over a day more than 95% meet it (docs/scaling.md)."""


class Demand(Protocol):
    """What one role needs."""

    def observe(self, samples: Samples, now: float) -> None:
        """Take the current samples of the role's workers, every few seconds."""

    def workers(self, ahead_s: float) -> float:
        """The workers, a fraction, that will be needed in `ahead_s` seconds; 0: nothing arrives."""


class PrefillDemand:
    """TTFT is the wait for a prefill worker and the prefill itself.

    The prefill's quantile is taken as if prompts were distributed exponentially: 1.9 times its mean. What it
    leaves of the objective may be waited. When it leaves less than a quarter, because prompts are long, more
    workers hardly help, so a quarter may be waited. Queued tokens are to be computed within `CATCH_UP_S`.
    """

    CATCH_UP_S = 30.0
    _KEPT = 0.98  # weight of earlier prompts in the mean, per observation

    def __init__(self, ttft_p95_s: float, memory_s: float = MEMORY_S) -> None:
        """`memory_s`: as for Forecast."""
        self._objective_s = ttft_p95_s
        self._arrived = Forecast(memory_s)
        self._computed, self._began = Totals(), Totals()
        self._queued = 0.0
        self._speed = 0.0
        self._serving = 0
        self._tokens = self._prompts = 0.0  # lately

    def observe(self, samples: Samples, now: float) -> None:
        """See Demand. What arrived is what was computed and the growth of the queue."""
        computed = self._computed.growth({name: one.prefilled_tokens for name, one in samples.items()})
        began = self._began.growth({name: one.prompts for name, one in samples.items()})
        queued = sum(one.queued_tokens for one in samples.values())
        self._arrived.observe(max(0.0, computed + queued - self._queued), now)
        self._queued, self._serving = queued, len(samples)
        self._tokens = self._KEPT * self._tokens + computed
        self._prompts = self._KEPT * self._prompts + began
        speeds = [one.prefill_tokens_per_s for one in samples.values() if one.prefill_tokens_per_s > 0]
        if speeds:
            self._speed = sum(speeds) / len(speeds)

    def workers(self, ahead_s: float) -> float:
        """See Demand."""
        if not self._speed or self._prompts <= 0:
            return 0.0
        service_s = self._tokens / self._prompts / self._speed
        allowed_s = max(self._objective_s + math.log(1 - SHARE) * service_s, self._objective_s / 4)
        overdue = max(0.0, self._queued - allowed_s * self._speed * self._serving)
        busy = (self._arrived.rate(ahead_s) + overdue / self.CATCH_UP_S) / self._speed
        if busy <= 0:
            return 0.0
        return fewest(lambda workers: wait_quantile(workers, busy, service_s, SHARE) <= allowed_s)


class DecodeDemand:
    """A step of `rows` requests takes `fixed + slope rows` seconds.

    A worker that makes x tokens a second then has r = fixed x / (1 - slope x) rows, so fewer workers have
    longer steps and more rows in all. A fleet is large enough when the step is within the objective and the
    rows, with their share of a worker's rows or memory, fit.
    """

    FULLEST = 0.95  # share of a worker's rows and memory that may be in use

    def __init__(self, itl_p95_s: float, memory_s: float = MEMORY_S) -> None:
        """`memory_s`: as for Forecast."""
        self._objective_s = itl_p95_s
        self._made = Forecast(memory_s)
        self._decoded = Totals()
        self._fixed = math.inf  # the shortest step seen
        self._slope = 0.0
        self._share = 0.0  # of a worker, that one request takes

    def observe(self, samples: Samples, now: float) -> None:
        """See Demand. Requests that wait count as if they made tokens as fast as those that run."""
        decoded = self._decoded.growth({name: one.decoded_tokens for name, one in samples.items()})
        rows = sum(one.rows for one in samples.values())
        waiting = sum(one.waiting for one in samples.values())
        self._made.observe(decoded * (1 + waiting / rows) if rows else decoded, now)
        if rows:
            self._share = sum(one.share for one in samples.values()) / rows
        running = [one for one in samples.values() if one.step_s > 0 and one.rows >= 1]
        if running:
            self._fixed = min(self._fixed, *(one.step_s for one in running))
            steps = sum(one.step_s - self._fixed for one in running)
            self._slope = steps / sum(one.rows for one in running)

    def workers(self, ahead_s: float) -> float:
        """See Demand."""
        made = self._made.rate(ahead_s)
        if made <= 0 or math.isinf(self._fixed):
            return 0.0
        return fewest(lambda workers: self._enough(workers, made))

    def _enough(self, workers: float, tokens_per_s: float) -> bool:
        each = tokens_per_s / workers
        left = 1 - self._slope * each
        if left <= 0:
            return False
        rows = self._fixed * each / left * workers
        step_s = self._fixed + self._slope * rows / workers
        return step_s <= self._objective_s and rows * self._share <= self.FULLEST * workers
