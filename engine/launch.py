"""Runs forwards in the order in which they are launched, on one executor thread or on the caller's.

A forward only queues work on its device, and returns a function that reads its result when that work is done.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import ref

from engine.batch import BatchResult
from engine.completion import Completion, Completions, HostCompletions
from engine.errors import DeviceLost, EngineError

Read = Callable[[], BatchResult]
"""Gives a forward's result. Called once, after the forward's completion."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A forward whose work is queued on the device, or the exception that it raised while queuing.

    A forward that raised has a completion too: the work that it queued before may still write to its pages.
    """

    completion: Completion
    read: Read | Exception


@dataclass(frozen=True, slots=True)
class Launched:
    """A Pending over a future."""

    future: Future[Issued]

    def result(self, timeout_s: float) -> BatchResult:
        """Wait until the device is done, then read the result. Raises EngineError, whose cause is the
        exception that the forward raised, and DeviceLost if the device is not done in time or failed."""
        deadline = time.monotonic() + timeout_s
        try:
            issued = self.future.result(timeout_s)
            issued.completion.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise DeviceLost(f"a forward gave no result within {timeout_s} s") from error
        except Exception as error:
            raise DeviceLost(f"the device failed: {type(error).__name__}: {error}") from error
        if isinstance(issued.read, DeviceLost):
            raise issued.read
        if isinstance(issued.read, Exception):
            raise _failed(issued.read) from issued.read
        try:
            return issued.read()
        except Exception as error:
            raise _failed(error) from error


class LaunchQueue:
    """Runs functions one after the other, in the order in which they are launched."""

    def __init__(self, overlap: bool, name: str = "engine", completions: Completions | None = None) -> None:
        """`completions` are those of the device that the functions put work on, by default the CPU."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name) if overlap else None
        self._completions = completions or HostCompletions()
        self._last: Callable[[], Future[Issued] | None] = lambda: None  # given to the executor; weakly held

    def launch(self, forward: Callable[[], Read], is_brief: bool = False) -> Launched:
        """Queue `forward`, or run it at once if there is no overlap. result() raises its errors.

        A brief one, which soon returns and waits for nothing, is run at once with overlap too, if no other is
        still queued: to wake a thread takes a good part of the time that the host has for a decode step.
        """
        last = self._last()
        is_free = last is None or last.done()
        if self._executor is not None and not (is_brief and is_free):
            queued = self._executor.submit(self._issue, forward)
            self._last = ref(queued)
            return Launched(queued)
        future: Future[Issued] = Future()
        try:
            future.set_result(self._issue(forward))
        except Exception as error:  # noqa: BLE001  result() raises it as DeviceLost
            future.set_exception(error)
        return Launched(future)

    def close(self) -> None:
        """Run the queued functions, then end the thread. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)

    def _issue(self, forward: Callable[[], Read]) -> Issued:
        try:
            read = forward()
        except Exception as error:  # noqa: BLE001  result() raises it
            _free_frames(error)
            return Issued(self._completions.record(), error)
        return Issued(self._completions.record(), read)


def _failed(error: Exception) -> EngineError:
    return EngineError(f"a forward failed: {type(error).__name__}: {error}")


def _free_frames(error: BaseException | None) -> None:
    """Free the local variables of a forward that raised: else its tensors live as long as the exception. On a
    GPU without memory the next forward, which may be launched already, would fail for them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
