"""One request's choices between their rooms and the HTTP side. Rooms here only remember being stopped."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from common.errors import SlowClient, Unavailable
from router.api.openai.answers import CompletionStyle, SseWriter
from router.streams.generation import MOST_UNREAD, ChoiceOutput, Generation, Submission
from router.streams.stream import RoomStream
from router.text.tokenization import Tokenization
from wire.messages import FinishReason, SamplingParams


@dataclass
class Room:
    cached_tokens: int = 0
    stopped: str = ""

    def stop(self, reason: str) -> None:
        self.stopped = reason


class Request:
    """A streamed request of so many choices."""

    def __init__(self, model: Path, n: int = 1) -> None:
        detokenizers = Tokenization(model).detokenizers
        self.ended = 0
        submission = Submission("r", [[1]], SamplingParams(), n=n)
        self.generation = Generation(submission, lambda _: None, self._on_end)
        for index in range(n):
            output = ChoiceOutput(index, self.generation, detokenizers.make(), ())
            output.room = cast("RoomStream", Room())
            self.generation.outputs.append(output)
        self.writer = SseWriter(CompletionStyle(detokenizers, False), "r", 1, "m", include_usage=False)
        self.generation.answer = self.writer

    def _on_end(self, _: Generation) -> None:
        self.ended += 1

    def stopped(self) -> list[str]:
        return [cast("Room", output.room).stopped for output in self.generation.outputs]


def events(taken: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in taken.decode().split("\n\n") if line]


def test_what_came_in_one_turn_is_sent_at_once_an_event_per_token(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first, second = request.generation.outputs
        waiting = asyncio.create_task(request.generation.more())
        await asyncio.sleep(0)
        first.on_tokens([70], None, None)
        second.on_tokens([71], None, None)
        first.on_tokens([72], None, FinishReason.LENGTH)
        assert await waiting
        got = events(request.writer.take())
        assert [event["choices"][0]["index"] for event in got] == [0, 1, 0]
        assert [event["choices"][0]["finish_reason"] for event in got] == [None, None, "length"]
        second.on_tokens([73], None, FinishReason.STOP)
        assert await request.generation.more()
        assert len(events(request.writer.take())) == 1
        assert not await request.generation.more()
        assert (request.ended, request.stopped()) == (1, ["", ""])

    asyncio.run(run())


def test_a_client_that_does_not_read_ends_its_request_and_holds_a_bounded_buffer(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first = request.generation.outputs[0]
        most = 0
        while not request.generation.ended:  # nobody takes
            first.on_tokens([70], None, None)
            most = max(most, request.writer.unread)
        assert MOST_UNREAD < most < MOST_UNREAD + 1000
        assert all("wait for this client" in reason for reason in request.stopped())
        assert request.ended == 1
        assert await request.generation.more()  # what came before is still told
        assert len(request.writer.take()) == most
        with pytest.raises(SlowClient):
            await request.generation.more()

    asyncio.run(run())


def test_a_choice_that_fails_stops_the_others_after_what_came_before(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first, second = request.generation.outputs
        first.on_tokens([70], None, None)
        second.on_error(Unavailable("gone"))
        assert await request.generation.more()
        with pytest.raises(Unavailable):
            await request.generation.more()
        assert "gone" in request.stopped()[0]

    asyncio.run(run())
