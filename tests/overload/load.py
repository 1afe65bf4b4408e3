"""Load: streams with known answers, sent at a rate whatever becomes of the earlier ones."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Self

import httpx

from engine.fake import fake_generate
from tests.support.sse import DONE

_PROMPT, _TOKENS, _SHORT = 64, 50, 10
_WHOLE_S = 600.0  # a stream that takes longer is lost


@dataclass
class Tally:
    """What became of the requests that were sent."""

    sent: int = 0
    accepted: int = 0
    lost: int = 0  # accepted, and not whole and right
    rejected: int = 0
    without_retry_after: int = 0

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Tally(*(one + another for one, another in pairs))


class Load:
    """A client of one router. Use it as an async context manager."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=_WHOLE_S, limits=limits)
        self._random = random.Random(7)
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def sustainable_rate(self, concurrency: int) -> float:
        """Requests per second that are served when a few always wait."""
        tally, began = Tally(), time.monotonic()

        async def client() -> None:
            for _ in range(5):
                await self._one(tally)

        await asyncio.gather(*(client() for _ in range(concurrency)))
        assert tally.accepted == tally.sent, f"the workers are full before the load: {tally}"
        return tally.sent / (time.monotonic() - began)

    async def at_once(self, count: int) -> Tally:
        """So many in one moment, to their ends."""
        tally = Tally()
        await asyncio.gather(*(self._one(tally) for _ in range(count)))
        return tally

    async def open_loop(self, rate: float, seconds: float) -> Tally:
        """Send at this rate. Returns when the last is sent; the tally is complete after `finish`."""
        tally, began = Tally(), time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            task = asyncio.create_task(self._one(tally))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return tally

    async def until_recovered(self, first_s: float, gap_s: float, most_s: float) -> float:
        """Seconds until a new stream has all of its tokens in time; `most_s` if none has."""
        began = time.monotonic()
        while (asked := time.monotonic()) - began < most_s:
            if await self._in_time(first_s, gap_s):
                return asked - began
            await asyncio.sleep(0.2)
        return most_s

    async def finish(self) -> None:
        """Wait for the streams that still run."""
        await asyncio.gather(*self._running)

    async def _in_time(self, first_s: float, gap_s: float) -> bool:
        """Whether a short stream meets the objectives. It is left as soon as it does not."""
        tokens = 0
        async with self._http.stream("POST", "/generate", json=self._body(self._prompt(), _SHORT)) as answer:
            lines = answer.aiter_lines()
            while tokens < _SHORT:
                try:
                    line = await asyncio.wait_for(anext(lines), gap_s if tokens else first_s)
                except (TimeoutError, StopAsyncIteration):
                    return False
                tokens += line.startswith("data: {")
        return answer.status_code == 200

    async def _one(self, tally: Tally) -> None:
        prompt, tally.sent = self._prompt(), tally.sent + 1
        output: list[int] = []
        done = False
        try:
            async with self._http.stream("POST", "/generate", json=self._body(prompt, _TOKENS)) as answer:
                if answer.status_code == 429:
                    tally.rejected += 1
                    tally.without_retry_after += not answer.headers.get("retry-after", "").isdigit()
                    return
                tally.accepted += answer.status_code == 200
                async for line in answer.aiter_lines():
                    done = done or line == f"data: {DONE}"
                    if line.startswith("data: {"):
                        output = json.loads(line[6:]).get("output_ids", [])
        except httpx.HTTPError:
            done = False
        if not done or output != fake_generate(prompt, _TOKENS):
            tally.lost += 1

    def _prompt(self) -> list[int]:
        return [self._random.randrange(256) for _ in range(_PROMPT)]

    @staticmethod
    def _body(prompt: list[int], tokens: int) -> dict[str, object]:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}
