"""TimedLock: a lock that notes how long the measured thread spends with it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_ROOT = str(Path(__file__).resolve().parents[1])
_PACKAGES = f"{_ROOT}/.venv/"


class TimedLock:
    """A `threading.Lock` for `with` statements."""

    def __init__(self, held: list[float], thread: int) -> None:
        self._lock = _Lock()
        self._held = held
        self._thread = thread
        self._asked_at = 0.0

    def __enter__(self) -> None:
        asked_at = time.perf_counter()
        self._lock.acquire()
        self._asked_at = asked_at

    def __exit__(self, *_: object) -> None:
        asked_at = self._asked_at
        self._lock.release()
        if threading.get_ident() == self._thread:
            self._held.append(time.perf_counter() - asked_at)


_Lock = threading.Lock


@contextmanager
def own_locks_timed() -> Iterator[list[float]]:
    """Locks that our own code makes in this context note, when this thread uses them, the seconds from asking
    for the lock to giving it back."""
    held: list[float] = []
    thread = threading.get_ident()

    def make() -> object:
        maker = sys._getframe(1).f_code.co_filename
        is_own = maker.startswith(_ROOT) and not maker.startswith(_PACKAGES)
        return TimedLock(held, thread) if is_own else _Lock()

    with mock.patch("threading.Lock", make):
        yield held
