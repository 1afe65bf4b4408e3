"""Runs forwards in the order in which they are launched, on one executor thread or inline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from engine.batch import BatchResult
from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class Launched:
    """A Pending over a future."""

    future: Future[BatchResult]

    def result(self, timeout_s: float) -> BatchResult:
        """Wait for the result. Raises EngineError, whose cause is the exception that the forward raised."""
        try:
            return self.future.result(timeout_s)
        except TimeoutError as error:
            raise EngineError(f"a forward gave no result within {timeout_s} s") from error
        except Exception as error:
            raise EngineError(f"a forward failed: {type(error).__name__}: {error}") from error


class LaunchQueue:
    """Runs functions one after the other, in the order in which they are launched."""

    def __init__(self, overlap: bool, name: str = "engine") -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name) if overlap else None

    def launch(self, forward: Callable[[], BatchResult]) -> Launched:
        """Queue `forward`, or run it at once if there is no overlap. result() raises its errors."""
        if self._executor is not None:
            return Launched(self._executor.submit(forward))
        future: Future[BatchResult] = Future()
        try:
            future.set_result(forward())
        except Exception as error:  # noqa: BLE001  result() raises it as EngineError
            future.set_exception(error)
        return Launched(future)

    def close(self) -> None:
        """Run the queued functions, then end the thread. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
