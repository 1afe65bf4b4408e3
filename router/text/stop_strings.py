"""Stop strings over a stream of text pieces. Workers never see text, so this is the router's alone."""

from __future__ import annotations


class StopStrings:
    """Finds the earliest stop string, wherever the borders between pieces fall.

    Text that could still become a stop string is held back. The stop string itself is never let through.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string that was hit, if one was."""
        text = self._held + piece
        hit, at = None, len(text)
        for stop in self._stops:
            found = text.find(stop)
            if 0 <= found < at:
                hit, at = stop, found
        if hit is not None:
            self._held = ""
            return text[:at], hit
        keep = self._longest_partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _longest_partial(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
