"""Mover: does work that takes long (copies, storage) on threads of its own; its owner takes what is done.

Work of one lane is done in order. Lanes do not wait for each other: a load is not behind backups, and neither
waits for a disk.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)

_CLOSE_S = 10.0

Work = Callable[[], Any]
Done = Callable[[Any], None]


class Failed(NamedTuple):
    """What work that raised has for a result."""

    error: Exception


class WorkQueue(Protocol):
    """What carries out a tier's work. Tests have one without threads."""

    def submit(self, lane: str, work: Work, done: Done) -> None:
        """Do `work`, and give what it returns, or Failed, to `done`, in a later `take_done`."""
        ...

    def take_done(self) -> bool:
        """Call `done` of all work that has ended since. Whether there was any. Never waits."""
        ...

    def on_done(self, wake: Callable[[], None]) -> None:
        """From now on call `wake`, on any thread, when work has ended."""
        ...

    def close(self) -> None:
        """End the threads. What they have not begun is dropped."""
        ...


class Mover:
    """Implements WorkQueue. One owner, whose thread calls all methods."""

    def __init__(self) -> None:
        self._lanes: dict[str, queue.SimpleQueue[tuple[Work, Done] | None]] = {}
        self._done: queue.SimpleQueue[tuple[Done, Any]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wake: Callable[[], None] = lambda: None
        self._closing = False
        self.beats = 0

    def on_done(self, wake: Callable[[], None]) -> None:
        """See WorkQueue."""
        self._wake = wake

    def submit(self, lane: str, work: Work, done: Done) -> None:
        """See WorkQueue."""
        assert not self._closing, "the mover is closed"
        if lane not in self._lanes:
            self._open(lane)
        self._lanes[lane].put((work, done))

    def _open(self, lane: str) -> None:
        waiting: queue.SimpleQueue[tuple[Work, Done] | None] = queue.SimpleQueue()
        self._lanes[lane] = waiting
        thread = threading.Thread(target=self._run, args=(waiting,), name=f"kv-{lane}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, waiting: queue.SimpleQueue[tuple[Work, Done] | None]) -> None:
        while (item := waiting.get()) is not None:
            if self._closing:
                return
            work, done = item
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the owner decides what a failure means
                log.warning("kv tiers: %r", error)
                result = Failed(error)
            self._done.put((done, result))
            self._wake()

    def take_done(self) -> bool:
        """See WorkQueue."""
        any_done = False
        while not self._done.empty():
            done, result = self._done.get()
            done(result)
            any_done = True
        return any_done

    def close(self) -> None:
        """See WorkQueue. Idempotent."""
        self._closing = True
        for waiting in self._lanes.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
