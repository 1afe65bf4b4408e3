"""Link: one worker's network. A transfer needs the sender's outgoing and the receiver's incoming direction.
Each direction has one transfer at a time, first come, first served."""

from __future__ import annotations


class Link:
    """Two directions of equal speed."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._out_free_at = 0.0
        self._in_free_at = 0.0

    def send(self, to: Link, size: float, now: float) -> float:
        """Begin a transfer of `size` bytes as soon as possible. Returns when they will have arrived."""
        start = max(now, self._out_free_at, to._in_free_at)
        end = start + size / min(self._bytes_per_s, to._bytes_per_s)
        self._out_free_at = to._in_free_at = end
        return end
