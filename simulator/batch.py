"""DecodeBatch: the requests that a worker decodes together, many steps at a time.

While nobody joins or leaves, k steps of n requests take `k first + growth k (k - 1) / 2` seconds: each step
adds n tokens of context to the next. So a simulation jumps from one change of the batch to the next.
"""

from __future__ import annotations

import heapq
import math
from array import array
from dataclasses import dataclass

from simulator.options import Schedule, WorkerModel
from simulator.request import Attempt

_LEAST_S, _RATIO = 1e-5, 1.02  # of the histogram: 2% steps from 10 microseconds to beyond an hour
_BINS = 1000


class ItlHistogram:
    """Times between tokens, as a histogram."""

    def __init__(self) -> None:
        self.total = 0
        self._bins = array("q", [0]) * _BINS

    def add(self, seconds: float, count: int = 1) -> None:
        """So many gaps of that length."""
        at = int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / math.log(_RATIO))
        self._bins[min(at, _BINS - 1)] += count
        self.total += count

    def quantile(self, share: float) -> float:
        """Seconds, right within 1%; 0 without gaps."""
        wanted, seen = share * self.total, 0
        for at, count in enumerate(self._bins):
            seen += count
            if seen >= wanted > 0:
                return float(_LEAST_S * _RATIO ** (at + 0.5))
        return 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Equal steps, begun at `start`: the first takes `first` seconds, each next one `growth` more."""

    start: float
    first: float
    growth: float
    most: int  # then a request ends
    decodes: bool = True

    def end(self, steps: int) -> float:
        """When so many are done."""
        return self.start + steps * self.first + self.growth * steps * (steps - 1) / 2

    def under_way(self, now: float) -> int:
        """How many it takes until the one that runs `now` is done."""
        elapsed, half = now - self.start, self.growth / 2
        if elapsed <= self.first:
            return 1
        rise = self.first - half
        steps = elapsed / rise
        if half > 0:
            steps = (math.sqrt(rise * rise + 4 * half * elapsed) - rise) / (2 * half)
        return min(self.most, max(1, math.ceil(steps - 1e-9)))


class DecodeBatch:
    """Requests with all their KV, one token each a step."""

    def __init__(self, model: WorkerModel, gaps: ItlHistogram) -> None:
        self.context = 0  # tokens
        self.tokens = 0  # made so far
        self._model = model
        self._gaps = gaps
        self._steps = 0
        self._rows: list[tuple[int, int, Attempt]] = []  # a heap by the step that ends it
        self._fresh: list[Attempt] = []
        self._joined = 0
        self._last_at = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, one: Attempt, left: int) -> None:
        """Its next token comes with the next step; so many are left."""
        self._joined += 1
        heapq.heappush(self._rows, (self._steps + left, self._joined, one))
        self._fresh.append(one)
        self.context += one.prompt + one.output - left

    def steps(self, now: float, prompt_tokens: int) -> Steps:
        """What runs from now on. With a chunk of so many prompt tokens it is one step; without rows, or where
        steps are not mixed, the batch waits for it."""
        model, rows = self._model, len(self._rows)
        first = max(model.step_s, prompt_tokens / model.prefill_tokens_per_s)
        if not rows or (prompt_tokens and model.schedule is not Schedule.MIXED):
            return Steps(now, first, 0.0, 1, decodes=False)
        first += model.row_s * rows + model.context_s * self.context
        if prompt_tokens:
            return Steps(now, first, 0.0, 1)
        return Steps(now, first, model.context_s * rows, self._rows[0][0] - self._steps)

    def advance(self, run: Steps, steps: int) -> list[Attempt]:
        """So many steps of `run` are done. Returns who is finished; they have left."""
        if not run.decodes:
            return []
        rows, gaps = len(self._rows), self._gaps
        first_end = run.end(1)
        for one in self._fresh:
            gaps.add(first_end - one.last_at)
        if rows > len(self._fresh):
            gaps.add(first_end - self._last_at, rows - len(self._fresh))
        self._fresh.clear()
        if steps > 1:
            gaps.add((run.end(steps) - first_end) / (steps - 1), (steps - 1) * rows)
        self._last_at = run.end(steps)
        self._steps += steps
        self.context += steps * rows
        self.tokens += steps * rows
        done = []
        while self._rows and self._rows[0][0] <= self._steps:
            one = heapq.heappop(self._rows)[2]
            self.context -= one.prompt + one.output
            done.append(one)
        return done

    def unfinished(self) -> list[tuple[Attempt, int]]:
        """Everybody in it, with the tokens they still lack."""
        return [(one, end - self._steps) for end, _, one in self._rows]
