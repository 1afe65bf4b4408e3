"""Puts a publisher's numbered batches in order, and notices what is missing."""

from __future__ import annotations


class SequenceRepair:
    """Batches of one publisher, numbered from 0. Live ones may be lost or doubled; replays come in order."""

    def __init__(self) -> None:
        self.expected = 0  # the next number to apply
        self._early: dict[int, bytes] = {}

    @property
    def gap(self) -> bool:
        """Something was lost on the way: ask for a replay from `expected`."""
        return bool(self._early)

    def live(self, number: int, payload: bytes) -> list[bytes]:
        """The batches that can be applied now, in order."""
        if number >= self.expected:
            self._early[number] = payload
        return self._in_order()

    def replayed(self, number: int, payload: bytes) -> tuple[list[bytes], bool]:
        """As `live`; and whether batches before this one are gone from the replay buffer for ever."""
        lost = number > self.expected
        if lost:
            self.expected = number
            self._early = {n: early for n, early in self._early.items() if n >= number}
        return self.live(number, payload), lost

    def _in_order(self) -> list[bytes]:
        ready = []
        while self.expected in self._early:
            ready.append(self._early.pop(self.expected))
            self.expected += 1
        return ready
