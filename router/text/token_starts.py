"""TokenStarts: where in a choice's text its tokens begin, which tells how many of them are thoughts."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from wire.request import OutputDelta


class TokenStarts:
    """Of one choice, while it grows."""

    def __init__(self) -> None:
        self._starts = array("Q")
        self._length = 0

    def add(self, text: str, delta: OutputDelta) -> None:
        """The choice has gained these tokens, and by them this text."""
        if len(delta.tokens) == 1:
            self._starts.append(self._length)
        else:
            self._starts.extend(self._length + start for start in delta.starts)
        self._length += len(text)

    def between(self, bounds: Sequence[int]) -> int:
        """How many tokens begin between these places, each two of which are a beginning and an end. Where the
        last has no end, all that follow count."""
        counts = [bisect_left(self._starts, place) for place in bounds]
        if len(counts) % 2:
            counts.append(len(self._starts))
        return sum(counts[1::2]) - sum(counts[::2])
