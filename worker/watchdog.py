"""Watchdog: sees whether a worker's threads live and come round.

Each watched thread counts its rounds. One that has ended has failed at once; one whose count stands still for
longer than its bound is stuck. The time is counted in the watchdog's own looks: a process that was stopped as
a whole, or that was given no processor, has not stood still.

It has a thread of its own. The heartbeat's may block while it looks for the directory.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

_LOOK_S = 0.25


class Beating(Protocol):
    """Something with a thread that comes round."""

    @property
    def running(self) -> bool:
        """Whether the thread lives."""

    @property
    def beats(self) -> int:
        """How often it has come round."""


@dataclass(slots=True)
class Watched:
    """A thread to watch. `bound_s` says how long a round may take at present."""

    name: str
    thread: Beating
    bound_s: Callable[[], float]
    beats: int = -1  # at the last look
    still_s: float = 0.0


class Watchdog:
    """Watches threads until the first of them has failed, or until `close`."""

    def __init__(self, watched: list[Watched], on_failure: Callable[[str], None]) -> None:
        """`on_failure` is called once, on the watchdog's thread, with what has failed."""
        self.failure: str | None = None
        self._watched = watched
        self._on_failure = on_failure
        self._closing = False
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch. All threads must run."""
        self._thread.start()

    def look_now(self) -> None:
        """A thread is about to end."""
        self._look.set()

    def close(self) -> None:
        """Watch no more: the threads are going to end."""
        self._closing = True
        self._look.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._closing:
            self._look.wait(_LOOK_S)
            now = time.monotonic()
            passed_s, looked_at = min(now - looked_at, 2 * _LOOK_S), now
            failure = None if self._closing else self._find(passed_s)
            if failure is not None:
                log.error("%s: this worker gives up\n%s", failure, _stacks())
                self.failure = failure
                self._on_failure(failure)
                return

    def _find(self, passed_s: float) -> str | None:
        """What has failed, if anything has."""
        for one in self._watched:
            if not one.thread.running:
                return f"the {one.name} has died"
            beats = one.thread.beats
            one.still_s = one.still_s + passed_s if beats == one.beats else 0.0
            one.beats = beats
            if one.still_s > one.bound_s():
                return f"the {one.name} has been stuck for {one.still_s:.0f} s"
        return None


def _stacks() -> str:
    """Where each thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
