"""ThoughtState: ends a sequence's thoughts after so many tokens.

The tokens that end them are the only ones that may stand at the next positions. Which positions these are
depends on the outputs before alone, so nothing is kept, and a request that goes on elsewhere, or is computed
again, ends its thoughts at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.known_outputs import known_outputs
from wire.request import ThoughtLimit


class ThoughtState:
    """Of one sequence."""

    __slots__ = ("_closing", "_first", "_opening")

    def __init__(self, limit: ThoughtLimit) -> None:
        self._opening = limit.opening
        self._closing = limit.closing
        self._first = len(limit.opening) + limit.tokens  # the first position that is no thought's

    def needs(self, position: int) -> bool:
        """Whether what may stand at this output position depends on the tokens before it."""
        return self._first <= position < self._first + len(self._closing)

    def forced(self, outputs: Sequence[int], position: int, newest: int | None) -> int | None:
        """The one token that may stand at this output position; None: any. For `newest` and errors:
        known_outputs."""
        if not self.needs(position):
            return None
        before = known_outputs(outputs, 0, self._first, position, newest)
        begin = len(self._opening)
        if tuple(before[:begin]) != self._opening:
            return None  # the output has no thoughts
        said = self._said(before[begin:])
        at = said + position - self._first
        return self._closing[at] if at < len(self._closing) else None

    def _said(self, thoughts: list[int]) -> int:
        """How many of the tokens that end thoughts have been said by themselves: all, if they stand anywhere,
        or those of them with which the thoughts end."""
        closing = list(self._closing)
        count = len(closing)
        at = -1
        for _ in range(thoughts.count(closing[0])):  # a few; thoughts may have 100,000 tokens
            at = thoughts.index(closing[0], at + 1)
            if thoughts[at : at + count] == closing:
                return count
        return next(n for n in range(count - 1, -1, -1) if thoughts[len(thoughts) - n :] == closing[:n])
