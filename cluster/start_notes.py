"""What workers say while they start, on its way to the terminal of `baton serve`.

It goes through the directory's actor: workers run on other nodes, and Serve says of a replica that starts
only that it does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.start_log import start_log

_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class StartNote:
    """A line of one worker."""

    number: int  # from 1, in the order in which they came
    worker: str
    text: str


class StartNotes:
    """The newest lines of all workers."""

    def __init__(self) -> None:
        self._notes: deque[StartNote] = deque(maxlen=_MOST_KEPT)
        self._last = 0

    def add(self, worker: str, text: str) -> None:
        """Keep one more line."""
        self._last += 1
        self._notes.append(StartNote(self._last, worker, text))

    def after(self, number: int) -> list[StartNote]:
        """Those that came after `number`."""
        return [note for note in self._notes if note.number > number]


class _Forward(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def told(tell: Callable[[str], None]) -> Iterator[None]:
    """What this process says of its start inside is given to `tell`, too."""
    handler, level = _Forward(tell), start_log.level
    start_log.addHandler(handler)
    start_log.setLevel(logging.INFO)
    try:
        yield
    finally:
        start_log.setLevel(level)
        start_log.removeHandler(handler)
