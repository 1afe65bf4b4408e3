"""Rates: recent speed of forwards, and recent share of prompts that had to be computed. Routers use them to
predict the time to first token.

A forward's time runs from its launch, or with overlap from the result before it if that came later, to its
result. A mixed forward counts with its whole time for prefill and for decode: both waited for all of it.
Called on one thread; the clock is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_WINDOW_S = 5.0  # seconds of forwards, not of the clock: an idle worker keeps its rate
_KEPT = 1 - 1 / 32  # weight of earlier prompts, per new prompt
FORWARD_FACTOR = 5
"""A forward may take that many times its predicted duration before it is stuck."""


@dataclass(slots=True)
class _Lately:
    """Amount per second. A forward's weight falls with the seconds of the forwards after it."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        kept = math.exp(-seconds / _WINDOW_S)
        self.amount = kept * self.amount + amount
        self.seconds = kept * self.seconds + seconds


@dataclass(frozen=True, slots=True)
class _Launch:
    at: float
    decode_rows: int
    prefill_tokens: int
    expected_s: float


class Rates:
    """Must be told of every launch and every result, in launch order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._in_flight: deque[_Launch] = deque()
        self._landed_at = -math.inf
        self._prefill = _Lately()
        self._decode = _Lately()
        self._prompts = 0.0  # tokens of recent prompts
        self._computed = 0.0  # tokens of them that were not cached

    def launched(self, decode_rows: int, prefill_tokens: int) -> None:
        """A forward has been launched."""
        expected_s = self._expect(decode_rows, prefill_tokens)
        self._in_flight.append(_Launch(self._clock(), decode_rows, prefill_tokens, expected_s))

    def landed(self) -> float:
        """The oldest forward in flight has its result. Returns its seconds."""
        launch, now = self._in_flight.popleft(), self._clock()
        seconds = now - max(launch.at, self._landed_at)
        self._landed_at = now
        if launch.prefill_tokens:
            self._prefill.add(launch.prefill_tokens, seconds)
        if launch.decode_rows:
            self._decode.add(1, seconds)
        return seconds

    def admitted(self, tokens: int, to_compute: int) -> None:
        """The prefill of a prompt of `tokens` tokens begins; all but `to_compute` of them are cached."""
        self._prompts = _KEPT * self._prompts + tokens
        self._computed = _KEPT * self._computed + to_compute

    def to_compute(self, prompts: int, tokens: int) -> int:
        """Tokens to compute for `prompts` waiting prompts of `tokens` tokens in all, if as much of them is
        cached as of recent ones. They are matched only at admission, because the cache changes until then."""
        share = self._computed / self._prompts if self._prompts > 0 else 1.0
        return max(prompts, round(share * tokens))  # at least one token each

    @property
    def expected_s(self) -> float:
        """Seconds that the forwards in flight should take together, by the rates at their launches. Infinite
        if there was no rate for one of them. Any thread may ask."""
        return sum(launch.expected_s for launch in self._in_flight.copy())

    def bound_s(self, least_s: float) -> float:
        """Seconds after which the forwards in flight are stuck: `least_s`, or FORWARD_FACTOR times as long as
        they should take if that is more."""
        expected = self.expected_s
        return least_s if math.isinf(expected) else max(least_s, FORWARD_FACTOR * expected)

    def _expect(self, decode_rows: int, prefill_tokens: int) -> float:
        """A mixed forward takes at most as long as its two parts."""
        prefill, step = self.prefill_tokens_per_s, self.decode_step_s
        if (prefill_tokens and not prefill) or (decode_rows and not step):
            return math.inf
        return (prefill_tokens / prefill if prefill_tokens else 0.0) + (step if decode_rows else 0.0)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second, over forwards that compute some; 0 before the first."""
        return self._prefill.amount / self._prefill.seconds if self._prefill.seconds > 0 else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds between two tokens of a decoding request; 0 before the first."""
        return self._decode.seconds / self._decode.amount if self._decode.amount > 0 else 0.0
