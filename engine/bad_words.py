"""BadWords: sequences of tokens that an output may not have.

Only the last token of one is banned, where those before it have been said, as in vLLM: its other tokens are
parts of good words, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.known_outputs import known_outputs


class BadWords:
    """Of one sequence. It depends on the outputs before alone."""

    __slots__ = ("_longest", "_words")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """None of them is empty."""
        self._words = [(list(word[:-1]), word[-1]) for word in words]
        self._longest = max(len(beginning) for beginning, _ in self._words)

    def banned(self, outputs: Sequence[int], position: int, newest: int | None) -> list[int]:
        """The tokens that may not stand at this output position. For `newest` and errors: known_outputs."""
        start = max(0, position - self._longest)
        before = known_outputs(outputs, start, position, position, newest)
        return [
            last for beginning, last in self._words if before[len(before) - len(beginning) :] == beginning
        ]
