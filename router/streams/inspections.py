"""Inspections: questions and commands to workers that are answered by one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from wire.messages.any_message import AnyMessage
from wire.messages.caches import (
    CacheCleared,
    CacheTier,
    ClearCache,
    ForgetTenant,
    Inspect,
    Inspected,
    TenantForgotten,
)
from wire.settings import TenantGeneration

_REPEAT_S = 2.0  # until a command is sent again


class Inspections:
    """The questions that have no answer yet. Belongs to one event loop."""

    def __init__(self, send: Callable[[str, AnyMessage], None]) -> None:
        self._send = send
        self._tokens = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, to: str, what: str, timeout_s: float) -> str:
        """The report of the process with the mailbox at `to`. Raises TimeoutError when none comes."""
        return str(await self._asked(to, Inspect(what, next(self._tokens)), timeout_s, timeout_s))

    async def clear(self, to: str, tiers: list[CacheTier], timeout_s: float) -> CacheCleared:
        """Have the worker with the mailbox at `to` clear these tiers. Raises TimeoutError when it does not
        answer; it may do it yet."""
        command = ClearCache(tiers, next(self._tokens))
        answer = await self._asked(to, command, timeout_s, _REPEAT_S)
        assert isinstance(answer, CacheCleared), "a command has the answer to a question"
        return answer

    async def forget(
        self, to: str, tenant: str, generation: TenantGeneration, timeout_s: float
    ) -> TenantForgotten:
        """Have the worker with the mailbox at `to` forget a tenant. Raises TimeoutError as `clear` does."""
        command = ForgetTenant(tenant, generation, next(self._tokens))
        answer = await self._asked(to, command, timeout_s, _REPEAT_S)
        assert isinstance(answer, TenantForgotten), "a command has the answer to a question"
        return answer

    def answer(self, message: Inspected | CacheCleared | TenantForgotten) -> None:
        """An answer has come. It is dropped if nothing waits for it."""
        waiting = self._waiting.get(message.token)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.body if isinstance(message, Inspected) else message)

    async def _asked(
        self, to: str, message: Inspect | ClearCache | ForgetTenant, timeout_s: float, repeat_s: float
    ) -> Any:
        """What comes back. The message is sent again every `repeat_s`."""
        waiting = self._waiting[message.token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                while not waiting.done():
                    self._send(to, message)
                    await asyncio.wait([waiting], timeout=repeat_s)
                return waiting.result()
        finally:
            del self._waiting[message.token]
