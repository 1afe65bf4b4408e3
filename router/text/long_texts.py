"""LongTexts: long texts are tokenised beside the event loop, on few threads, and in bounded amounts.

The tokenizer releases the GIL, so that streams go on meanwhile. Without a bound, a few clients could take all
cores, and hold a text each while they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.errors import Overloaded
from common.freed_memory import return_freed_memory

LONG = 16_384
"""Characters. Shorter texts take less time than a change of threads, which other streams would wait for."""
_THREADS = 2
_MOST_WAITING = 64 << 20  # characters of texts that are being tokenised or wait
_GIVES_BACK = 1 << 20  # after a text of so many characters the allocator keeps tens of megabytes


Result = TypeVar("Result")


class LongTexts:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")
        self._waiting = 0

    async def run(self, size: int, convert: Callable[[], Result]) -> Result:
        """The result of `convert`, of a text of `size` characters or tokens. Raises Overloaded."""
        if self._waiting and self._waiting + size > _MOST_WAITING:
            waiting = f"{self._waiting} characters of other prompts wait to be tokenised"
            raise Overloaded(waiting, 1.0, "tokenizer")
        self._waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _converted, size, convert)
        finally:
            self._waiting -= size

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _converted(size: int, convert: Callable[[], Result]) -> Result:
    try:
        return convert()
    finally:
        if size > _GIVES_BACK:
            return_freed_memory()
