"""When what a forward put on its device is done.

On a CPU a forward is done when its last operator returns. On CUDA its operators are only queued then: its
pages are not written yet, and what it reads is still in use. So each forward has a Completion, recorded
behind its last operator, and its result is taken only after that: the scheduler then frees pages, measures
rates and lets pages leave for a peer. Copies on other streams and NICs know nothing of the stream on which a
forward computes.
"""

from __future__ import annotations

from typing import Protocol

import torch

from common.polling import poll


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


class HostCompletions:
    """Completions on a CPU: work is done when the call that does it returns."""

    def record(self) -> Completion:
        return _Done()


class CudaCompletions:
    """Completions of one CUDA device, by events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> Completion:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _Recorded(event)


def completions_of(device: torch.device) -> Completions:
    """The completions of a torch device."""
    return CudaCompletions(device) if device.type == "cuda" else HostCompletions()


class _Done:
    def wait(self, timeout_s: float) -> None:
        del timeout_s


class _Recorded:
    """Polls. A thread that waits for the event, and is waited for with a bound, would add two wake-ups of
    threads to each step, and both want the GIL, which a thread that issues a forward holds."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout_s: float) -> None:
        if not poll(self._event.query, timeout_s):
            raise TimeoutError
