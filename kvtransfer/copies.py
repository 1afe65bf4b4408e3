"""Copies between a pool on a device and pinned host memory, on a stream of their own.

A copy on the stream of the forwards would wait for every forward that is queued there, and delay those that
follow. Nothing orders the two streams on the device, because the host does: pages are sent after the
completion of the forward that wrote them, and what has landed is read by a forward launched after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from common.errors import TransferError
from common.polling import poll

_COPY_S = 30.0  # a copy of a few MiB takes less than a millisecond
_FAILURES = (RuntimeError, TransferError)  # of torch's streams and events, late


class Unsettled(TransferError):
    """Copies that are queued may still be carried out: their end cannot be seen."""


class Copied(Protocol):
    """A copy that is queued."""

    def wait(self) -> None:
        """Return when it is done. Raises TransferError when it is not done in time."""
        ...


class CopyQueue(Protocol):
    """Carries copies out in the order in which they are put."""

    def put(self, copy: Callable[[], object]) -> Copied:
        """Queue what `copy` does with tensors. It must not wait, and its host memory is `pinned`."""
        ...

    def pinned(self, *shape: int) -> torch.Tensor:
        """New uint8 host memory for copies."""
        ...

    @property
    def stream(self) -> int:
        """The raw handle of the stream, for what `put` queues past torch."""
        ...


def settle(copies: CopyQueue) -> None:
    """After a failure: wait for everything that was queued all the same. Raises Unsettled if its end cannot
    be seen."""
    try:
        copies.put(lambda: None).wait()
    except _FAILURES as error:
        raise Unsettled(f"copies from or to the device may go on: {error}") from error


class CudaCopies:
    """A CUDA stream. Any thread may use it; copies of several threads take turns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    def put(self, copy: Callable[[], object]) -> Copied:
        with torch.cuda.stream(self._stream):
            copy()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Recorded(event)

    def pinned(self, *shape: int) -> torch.Tensor:
        """Of torch's caching allocator, which hands it out again only after the copies that use it."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


class HostCopies:
    """Copies of memory of the host that is not in place, done when they are put."""

    stream = 0

    def put(self, copy: Callable[[], object]) -> Copied:
        copy()
        return _Done()

    def pinned(self, *shape: int) -> torch.Tensor:
        """Any memory is as good."""
        return torch.empty(shape, dtype=torch.uint8)


class _Done:
    def wait(self) -> None:
        pass


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        if not poll(self._event.query, _COPY_S):
            raise TransferError(f"a copy from or to the device was not done within {_COPY_S:.0f} s")
