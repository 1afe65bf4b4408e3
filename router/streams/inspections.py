"""Inspections: questions to workers that are answered by one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from wire.messages import AnyMessage, Inspect, Inspected


class Inspections:
    """The questions that have no answer yet. Belongs to one event loop."""

    def __init__(self, send: Callable[[str, AnyMessage], None]) -> None:
        self._send = send
        self._tokens = count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}

    async def ask(self, to: str, what: str, timeout_s: float) -> str:
        """The report of the process with the mailbox at `to`. Raises TimeoutError when none comes."""
        token = next(self._tokens)
        self._waiting[token] = asyncio.get_running_loop().create_future()
        self._send(to, Inspect(what, token))
        try:
            return await asyncio.wait_for(self._waiting[token], timeout_s)
        finally:
            del self._waiting[token]

    def answer(self, message: Inspected) -> None:
        """A report has come. It is dropped if nothing waits for it."""
        waiting = self._waiting.get(message.token)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.body)
