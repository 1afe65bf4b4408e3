"""Answers with many log-probabilities are written beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from common.errors import RequestFailed
from router.streams.large_answers import LargeAnswers


def written_by() -> bytes:
    return threading.current_thread().name.encode()


def test_only_large_answers_are_written_on_a_thread() -> None:
    async def ask() -> tuple[bytes, bytes]:
        answers = LargeAnswers()
        try:
            return await answers.written(100, written_by), await answers.written(100_000, written_by)
        finally:
            answers.close()

    few, many = asyncio.run(ask())
    assert few == written_by()
    assert many.startswith(b"answers")


def test_the_loop_turns_while_a_large_answer_is_written() -> None:
    def write() -> bytes:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        return b"done"

    async def count() -> int:
        answers = LargeAnswers()
        writing = asyncio.ensure_future(answers.written(100_000, write))
        turns = 0
        while not writing.done():
            await asyncio.sleep(0.001)
            turns += 1
        answers.close()
        assert await writing == b"done"
        return turns

    assert asyncio.run(count()) > 5


def test_what_fails_fails_where_it_is_awaited() -> None:
    def write() -> bytes:
        raise RequestFailed("lost")

    async def ask() -> None:
        answers = LargeAnswers()
        try:
            await answers.written(100_000, write)
        finally:
            answers.close()

    with pytest.raises(RequestFailed):
        asyncio.run(ask())
