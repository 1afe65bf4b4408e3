"""When what a forward put on its device is done.

On a CPU a forward is done when its last operator returns. On CUDA its operators are only queued then: its
pages are not written yet, and what it reads is still in use. So each forward has a Completion, recorded
behind its last operator, and its result is taken only after that: the scheduler then frees pages, measures
rates and lets pages leave for a peer. Copies on other streams and NICs know nothing of the stream on which a
forward computes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class Completion(Protocol):
    """A point in the work of a device."""

    def wait(self, timeout_s: float) -> None:
        """Return when all work before this point is done. Raises TimeoutError after `timeout_s` seconds, and
        what the device reports if it failed."""
        ...


class Completions(Protocol):
    """Records completions of one device. `record` is called on the thread that puts work on it."""

    def record(self) -> Completion:
        """The point behind all work that this thread has put on the device so far."""
        ...

    def close(self) -> None:
        """End the threads. Idempotent."""
        ...


class HostCompletions:
    """Completions on a CPU: work is done when the call that does it returns."""

    def record(self) -> Completion:
        return _Done()

    def close(self) -> None:
        """Nothing is open."""


class CudaCompletions:
    """Completions of one CUDA device, by events on the current stream.

    CUDA cannot wait for an event with a bound. So a thread of its own waits for the events in order, and
    others wait for that thread with a bound. Polling the event instead would hold the GIL against the thread
    that queues the next forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="device-completions")

    def record(self) -> Completion:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _Reached(self._waiter.submit(event.synchronize))

    def close(self) -> None:
        self._waiter.shutdown(wait=False)  # an event of a device that failed may never come


def completions_of(device: torch.device) -> Completions:
    """The completions of a torch device."""
    return CudaCompletions(device) if device.type == "cuda" else HostCompletions()


class _Done:
    def wait(self, timeout_s: float) -> None:
        del timeout_s


class _Reached:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> None:
        self._future.result(timeout_s)
