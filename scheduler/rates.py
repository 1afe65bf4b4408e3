"""Rates: how fast forwards are, and how much of a prompt they compute, lately. Routers predict from it.

A forward takes from its launch, or from the result before it if that came later (overlap), to its result:
what it costs whoever waits, host work under way included. A mixed forward counts for both, whole: its prompts
and its decode rows waited for all of it. One thread; the clock is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_WINDOW_S = 5.0  # of forwards of the kind, not of time: a rate survives idling
_KEPT = 1 - 1 / 32  # of earlier prompts, with each new one


@dataclass(slots=True)
class _Lately:
    """Amount per second, each forward fading with the seconds of those after it."""

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


class Rates:
    """Told of every launch and of every result, in the order of the launches."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._out: deque[_Launch] = deque()
        self._landed_at = -math.inf
        self._prefill = _Lately()
        self._decode = _Lately()
        self._prompts = 0.0  # tokens, fading
        self._computed = 0.0  # of them

    def launched(self, decode_rows: int, prefill_tokens: int) -> None:
        """A forward is out."""
        self._out.append(_Launch(self._clock(), decode_rows, prefill_tokens))

    def landed(self) -> None:
        """The oldest forward that is out has its result."""
        launch, now = self._out.popleft(), self._clock()
        seconds = now - max(launch.at, self._landed_at)
        self._landed_at = now
        if launch.prefill_tokens:
            self._prefill.add(launch.prefill_tokens, seconds)
        if launch.decode_rows:
            self._decode.add(1, seconds)

    def admitted(self, tokens: int, to_compute: int) -> None:
        """A prompt's prefill begins; the rest of its tokens was cached."""
        self._prompts = _KEPT * self._prompts + tokens
        self._computed = _KEPT * self._computed + to_compute

    def to_compute(self, prompts: int, tokens: int) -> int:
        """What so many prompts of so many tokens that wait will compute, if they are as cached as the last
        ones. They are matched when their turn comes, not before: by then the cache is another."""
        share = self._computed / self._prompts if self._prompts > 0 else 1.0
        return max(prompts, round(share * tokens))  # of each at least one token

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second in forwards that compute some; 0 before the first."""
        return self._prefill.amount / self._prefill.seconds if self._prefill.seconds > 0 else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds between two tokens of a decoding request; 0 before the first."""
        return self._decode.seconds / self._decode.amount if self._decode.amount > 0 else 0.0
