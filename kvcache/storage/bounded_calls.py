"""BoundedCalls: calls into a library that may never return, each given up after some seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class GivenUp(TimeoutError):
    """A call was given up, or not begun. What it uses is given back by BoundedCalls, now or when it ends."""


class BoundedCalls:
    """Each call runs on a thread of its own, which is left behind when the call takes too long.

    What a call uses must stay untouched until it has really ended. So `give_back` runs when a call that was
    given up ends, on its thread. A pool of threads was rejected: Python waits for its threads when a process
    ends, so one stuck call would keep it.
    """

    def __init__(self, seconds: float, at_once: int) -> None:
        self._seconds = seconds
        self._room = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._left_behind = 0

    @property
    def left_behind(self) -> int:
        """Calls that were given up and have not ended."""
        return self._left_behind

    def run(self, call: Callable[[], Result], give_back: Callable[[], None] = lambda: None) -> Result:
        """What the call returns or raises: then `give_back` is not called. Raises GivenUp if it takes too
        long, or if so many others are stuck that it was not begun."""
        if not self._room.acquire(timeout=self._seconds):
            give_back()
            raise GivenUp("too many calls are stuck")
        answer: list[Result] = []
        failure: list[BaseException] = []
        done = threading.Event()
        late = [False]

        def work() -> None:
            try:
                answer.append(call())
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                failure.append(error)
            with self._lock:
                done.set()
                self._left_behind -= late[0]
            self._room.release()
            if late[0]:
                give_back()

        thread = threading.Thread(target=work, name="storage call", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads
            self._room.release()
            raise
        done.wait(self._seconds)
        with self._lock:
            if not done.is_set():
                late[0] = True
                self._left_behind += 1
                raise GivenUp("a call is stuck")
        if failure:
            raise failure[0]
        return answer[0]
