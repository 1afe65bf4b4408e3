"""DecodeBatch: the requests that a worker decodes together, many steps at a time.

While no request joins or leaves, k steps of n requests take `k first + growth k (k - 1) / 2` seconds, because
each step adds n tokens of context. So a simulation jumps from one change of the batch to the next.
"""

from __future__ import annotations

import heapq
import math
from array import array
from dataclasses import dataclass
from typing import Generic, TypeVar

from simulator.options import Schedule, WorkerModel

T = TypeVar("T")
_LEAST_S, _RATIO = 1e-5, 1.02  # of the histogram: steps of 2% from 10 microseconds to more than an hour
_BINS = 1000


class ItlHistogram:
    """Times between tokens, as a histogram."""

    def __init__(self) -> None:
        self.total = 0
        self._bins = array("q", [0]) * _BINS

    def add(self, seconds: float, count: int = 1) -> None:
        """Count `count` intervals of this length."""
        at = int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / math.log(_RATIO))
        self._bins[min(at, _BINS - 1)] += count
        self.total += count

    def quantile(self, share: float) -> float:
        """Seconds, right within 1%; 0 for an empty histogram."""
        wanted, seen = share * self.total, 0
        for at, count in enumerate(self._bins):
            seen += count
            if seen >= wanted > 0:
                return float(_LEAST_S * _RATIO ** (at + 0.5))
        return 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one batch, from `start`. The first takes `first` seconds, and each next one `growth` more."""

    start: float
    first: float
    growth: float
    most: int  # steps until a request ends
    decodes: bool = True

    def end(self, steps: int) -> float:
        """When the first `steps` are done."""
        return self.start + steps * self.first + self.growth * steps * (steps - 1) / 2

    def under_way(self, now: float) -> int:
        """The number of steps until the one that runs `now` is done."""
        elapsed, half = now - self.start, self.growth / 2
        if elapsed <= self.first:
            return 1
        rise = self.first - half
        steps = elapsed / rise
        if half > 0:
            steps = (math.sqrt(rise * rise + 4 * half * elapsed) - rise) / (2 * half)
        return min(self.most, max(1, math.ceil(steps - 1e-9)))


class DecodeBatch(Generic[T]):
    """Requests with all their KV, which get one token each a step. `T` stands for a request."""

    def __init__(self, model: WorkerModel, itl: ItlHistogram) -> None:
        self.context = 0  # tokens of all requests
        self.tokens = 0  # made so far
        self._model = model
        self._itl = itl
        self._steps = 0
        self._rows: list[tuple[int, int, int, T]] = []  # a heap of (last step, number, last context, request)
        self._new: list[float] = []  # times of the latest tokens of requests that joined since the last step
        self._joined = 0
        self._last_at = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, request: T, context: int, left: int, token_at: float) -> None:
        """Its next token comes with the next step, and `left` tokens in all.

        `context` counts its tokens, the latest of which was made at `token_at`.
        """
        self._joined += 1
        heapq.heappush(self._rows, (self._steps + left, self._joined, context + left, request))
        self._new.append(token_at)
        self.context += context

    def steps(self, now: float, prompt_tokens: int) -> Steps:
        """What runs from `now` on.

        With a chunk of prompt tokens it is one step. The batch waits for a chunk where steps are not mixed.
        """
        model, rows = self._model, len(self._rows)
        first = max(model.step_s, prompt_tokens / model.prefill_tokens_per_s)
        if not rows or (prompt_tokens and model.schedule is not Schedule.MIXED):
            return Steps(now, first, 0.0, 1, decodes=False)
        first += model.row_s * rows + model.context_s * self.context
        if prompt_tokens:
            return Steps(now, first, 0.0, 1)
        return Steps(now, first, model.context_s * rows, self._rows[0][0] - self._steps)

    def advance(self, run: Steps, steps: int) -> list[T]:
        """The first `steps` of `run` are done. Returns the requests that are finished; they have left."""
        if not run.decodes:
            return []
        rows, itl = len(self._rows), self._itl
        first_end = run.end(1)
        for token_at in self._new:
            itl.add(first_end - token_at)
        if rows > len(self._new):
            itl.add(first_end - self._last_at, rows - len(self._new))
        self._new.clear()
        if steps > 1:
            itl.add((run.end(steps) - first_end) / (steps - 1), (steps - 1) * rows)
        self._last_at = run.end(steps)
        self._steps += steps
        self.context += steps * rows
        self.tokens += steps * rows
        done = []
        while self._rows and self._rows[0][0] <= self._steps:
            _, _, context, request = heapq.heappop(self._rows)
            self.context -= context
            done.append(request)
        return done

    def leave(self, request: T) -> int | None:
        """The request goes on elsewhere. To be called between two steps.

        Returns the number of tokens that it lacks, or None if it is not here.
        """
        for at, (end, _, context, row) in enumerate(self._rows):
            if row is request:
                lacking = end - self._steps
                self.context -= context - lacking
                del self._rows[at]
                heapq.heapify(self._rows)
                return lacking
        return None

    def made(self, run: Steps | None, now: float) -> int:
        """Tokens made so far, those of whole steps of the present run included."""
        under_way = run.under_way(now) - 1 if run is not None and run.decodes else 0
        return self.tokens + under_way * len(self._rows)

    def unfinished(self) -> list[tuple[T, int]]:
        """Every request in it, with the number of tokens that it still lacks."""
        return [(request, end - self._steps) for end, _, _, request in self._rows]
