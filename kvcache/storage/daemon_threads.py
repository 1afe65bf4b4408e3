"""DaemonThreads: an executor for the calls of a library that may never return."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class DaemonThreads(Executor):
    """Some threads that take one call after the other.

    Python waits for the threads of a ThreadPoolExecutor when a process ends, so one stuck call would keep it.
    It does not wait for these.
    """

    def __init__(self, count: int, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._is_shut = self._drops = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name} {number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """As of any Executor."""
        if self._is_shut:
            raise RuntimeError("no call is taken after shutdown")
        future: Future[Result] = Future()
        self._waiting.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of any Executor."""
        self._is_shut, self._drops = True, cancel_futures
        for _ in self._threads:
            self._waiting.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (taken := self._waiting.get()) is not None:
            future, call = taken
            if self._drops:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                future.set_exception(error)
            else:
                future.set_result(result)
