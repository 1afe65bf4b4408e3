"""StopSignal: SIGINT or SIGTERM has told this process to end."""

from __future__ import annotations

import queue
import signal


class StopSignal:
    """Made and asked on the main thread, where Python runs the handlers of signals.

    It is no Event: `set` takes a lock that the interrupted `wait` may hold, and would wait for it for ever.
    SimpleQueue's `put` takes none that `get` holds.
    """

    def __init__(self) -> None:
        """Both signals are taken from now on. Libraries that install handlers, as Ray does, come before."""
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._told.put(number))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether a signal has come, at the latest within `timeout_s`; None: wait for one."""
        if not self._came:
            try:
                self._told.get(timeout=timeout_s)
            except queue.Empty:
                return False
            self._came = True
        return True
