"""Observed: what a worker has reported of itself as it happened: stages of rooms, and what its gates hold."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

FIRST, MIDDLE, LAST, DECODE, MOVE = "first", "middle", "last", "decode", "move"
"""What can be held: a forward with the first, a middle or the last chunk of a prompt, one that only decodes,
and a granted write of pages."""

RoomKey = tuple[int, int]  # room, epoch
_POLL_S = 0.02


class Observed:
    """Reports since the last `clear`. Written by one thread, read by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all reports."""
        with self._lock:
            self.stages: dict[RoomKey, list[tuple[str, int]]] = defaultdict(list)  # (stage, at_ns)
            self.held: set[str] = set()
            self.retracted: set[RoomKey] = set()
            self.draining = False

    def add(self, event: tuple[Any, ...]) -> None:
        """Take a report (tests/chaos/gates.py)."""
        with self._lock:
            match event:
                case ("stage", room, epoch, stage, at_ns):
                    self.stages[room, epoch].append((stage, at_ns))
                case ("held", kinds):
                    self.held |= set(kinds)
                case ("passed", kinds):
                    self.held -= set(kinds)
                case ("retracted", room, epoch):
                    self.retracted.add((room, epoch))
                case ("draining",):
                    self.draining = True

    def rooms_in(self, reached: str, not_yet: tuple[str, ...]) -> list[tuple[RoomKey, int]]:
        """Rooms that have entered a stage and none of the others, and when (ns of the Unix clock)."""
        with self._lock:
            found = []
            for key, stages in self.stages.items():
                at = dict(stages)
                if reached in at and not any(stage in at for stage in not_yet):
                    found.append((key, at[reached]))
            return found


def wait_until(happened: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until something has happened. Whether it has, in time."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
