"""StandInCopies: a CopyQueue on the CPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from common.errors import TransferError

_GARBAGE = 0xEE


class StandInCopies:
    """A device may carry a copy out at once, or only when the host waits for it. Late copies show that the
    host waits before it reads or hands on what is copied; those at once, that no buffer is used too early."""

    def __init__(self, late: bool) -> None:
        self._late = late
        self._lock = threading.RLock()
        self.queued: deque[_Copy] = deque()
        self.most_queued = 0
        self.done = 0
        self.late_waits = 0  # so many waits give up before their copy is done

    @property
    def stream(self) -> int:
        return 0

    def put(self, copy: Callable[[], object]) -> _Copy:
        queued = _Copy(self, copy)
        with self._lock:
            self.queued.append(queued)
            self.most_queued = max(self.most_queued, len(self.queued))
            if not self._late:
                self.run(queued)
        return queued

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, _GARBAGE, dtype=torch.uint8)

    def run(self, last: _Copy) -> None:
        """Carry out what is queued up to `last`, in order."""
        with self._lock:
            while not last.done:
                first = self.queued.popleft()
                first.copy()
                first.done = True
                self.done += 1


@dataclass
class _Copy:
    queue: StandInCopies = field(repr=False)
    copy: Callable[[], object]
    done: bool = False

    def wait(self) -> None:
        if self.queue.late_waits:
            self.queue.late_waits -= 1
            raise TransferError("the copy was not done in time")
        self.queue.run(self)
