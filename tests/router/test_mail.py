"""Mail of a router and of its supervisor: one that fails does not keep back the rest of its batch."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from router.options import RouterOptions
from router.service import Router
from router.streams.inspections import Inspections
from router.supervisor import Supervisor
from wire.messages.caches import CacheCleared, Inspected, TenantForgotten
from wire.sockets import Mail


def test_mail_behind_one_that_fails_is_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []

    def answer(self: Inspections, message: Inspected | CacheCleared | TenantForgotten) -> None:
        if message.token == 1:
            raise ValueError("a bug")
        taken.append(message.token)

    monkeypatch.setattr(Inspections, "answer", answer)
    batch = [Mail("tcp://127.0.0.1:9", Inspected(token, "")) for token in (1, 2)]

    async def run() -> None:
        options = RouterOptions(model=model, served_model_name="tiny")
        router = Router(options)
        router._on_mail(batch)
        router.close()
        supervisor = Supervisor(options, "", 0, "")
        supervisor._on_mail(batch)
        await supervisor.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert taken == [2, 2]
    assert [record.message for record in caplog.records] == [
        "Inspected from tcp://127.0.0.1:9 cannot be taken"
    ] * 2
