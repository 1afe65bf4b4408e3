"""Stop strings in a stream of text pieces. Workers have only tokens, so the router looks for them."""

from __future__ import annotations


class StopStrings:
    """Finds the earliest stop string, also across pieces.

    Text that may be the beginning of a stop string is held back. The stop string itself is never returned.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that was found, if any."""
        text = self._held + piece
        hit, at = None, len(text)
        for stop in self._stops:
            found = text.find(stop)
            if 0 <= found < at:
                hit, at = stop, found
        if hit is not None:
            self._held = ""
            return text[:at], hit
        return self._hold_back(text), None

    def pass_by(self, piece: str) -> str:
        """The text that may be shown now, of a piece in which no stop string ends the output. One that begins
        there may."""
        return self._hold_back(self._held + piece)

    def _hold_back(self, text: str) -> str:
        """Hold back what may be the beginning of a stop string. Returns what comes before."""
        keep = self._longest_partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _longest_partial(self, text: str) -> int:
        """The length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
