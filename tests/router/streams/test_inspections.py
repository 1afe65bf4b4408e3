"""Questions and commands that one message answers."""

from __future__ import annotations

import asyncio

import pytest

from router.streams import inspections
from router.streams.inspections import Inspections
from wire.messages.any_message import AnyMessage
from wire.messages.caches import CacheCleared, ClearCache, Inspected


def test_a_command_is_sent_again_until_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspections, "_REPEAT_S", 0.01)
    sent: list[tuple[str, AnyMessage]] = []

    async def clear() -> CacheCleared:
        asked = Inspections(send)
        answers.append(asked)
        return await asked.clear("w", ["host"], 10.0)

    def send(to: str, message: AnyMessage) -> None:
        sent.append((to, message))
        if len(sent) == 3:
            answers[0].answer(CacheCleared(99, {"host": 1}))
            answers[0].answer(CacheCleared(1, {"host": 2}))
            answers[0].answer(CacheCleared(1, {"host": 3}))

    answers: list[Inspections] = []
    assert asyncio.run(clear()) == CacheCleared(1, {"host": 2})
    assert sent == [("w", ClearCache(["host"], 1))] * 3


def test_without_an_answer_there_is_a_timeout() -> None:
    async def ask() -> None:
        asked = Inspections(lambda *_: None)
        for question in (asked.ask("w", "tree", 0.01), asked.clear("w", ["host"], 0.01)):
            with pytest.raises(TimeoutError):
                await question
        asked.answer(Inspected(1, "late"))

    asyncio.run(ask())
