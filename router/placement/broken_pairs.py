"""BrokenPairs: prefill and decode workers that do not get through to each other, as their rooms found out.

Neither is suspected: this router hears both, and each may reach others. All rooms avoid the pair, until it
has handed a room over, one of the two is gone, or five seconds have passed since it was last found broken.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

_AVOID_S = 5.0  # then some rooms try: a link that was mended should not lie idle for long
_KEPT = 500  # for /debug/suspicions


@dataclass(slots=True)
class BrokenPair:
    """One pair of worker ids, as /debug/suspicions shows it. Times are of the Unix clock."""

    prefill: str
    decode: str
    at_unix: float
    cleared_at_unix: float | None = None


class BrokenPairs:
    """Shared by all rooms of a router. Belongs to one event loop; `now` is passed in."""

    def __init__(self) -> None:
        self.history: deque[BrokenPair] = deque(maxlen=_KEPT)
        self._current: dict[tuple[str, str], tuple[BrokenPair, float]] = {}  # with the time of its end

    def add(self, prefill: str, decode: str, now: float) -> None:
        """A room was not handed over, because one of the two did not get through to the other."""
        known = self._current.get((prefill, decode))
        if known is None:
            self.history.append(BrokenPair(prefill, decode, time.time()))
        pair = self.history[-1] if known is None else known[0]
        self._current[prefill, decode] = pair, now + _AVOID_S

    def works(self, prefill: str, decode: str) -> None:
        """A room was handed over."""
        if (prefill, decode) in self._current:
            self._end((prefill, decode))

    def gone(self, worker: str) -> None:
        """A worker is gone, or suspected of it: then it was no fault of its pairs."""
        for pair in [pair for pair in self._current if worker in pair]:
            self._end(pair)

    def broken(self, prefill: str, decode: str, now: float) -> bool:
        """Whether the two should not get a room together."""
        if not self._current:
            return False
        for pair in [pair for pair, (_, until) in self._current.items() if now >= until]:
            self._end(pair)
        return (prefill, decode) in self._current

    def _end(self, pair: tuple[str, str]) -> None:
        self._current.pop(pair)[0].cleared_at_unix = time.time()
