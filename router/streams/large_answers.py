"""LargeAnswers: answers with many log-probabilities are written beside the event loop.

A token with 20 alternatives takes 30 us to write, so that 16,000 tokens would hold up all streams for half a
second. There is one thread for all such answers: where threads compute, the loop waits for the interpreter's
lock, for 5 ms and each of them at every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_FEW = 4096  # log-probabilities: some milliseconds


class LargeAnswers:
    """Belongs to one event loop. Close it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def written(self, logprobs: int, write: Callable[[], bytes]) -> bytes:
        """What `write` returns or raises, which writes so many log-probabilities."""
        if logprobs <= _FEW:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self._thread, write)

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
