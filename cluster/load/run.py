"""Send a workload and time the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.load.api_client import AnswerFailed, ApiClient, TimedAnswer
from cluster.load.workload import Workload, arrivals


@dataclass
class Measured:
    """One run: its answers and failures, and the seconds from the first request to the last answer."""

    name: str
    answers: list[TimedAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Load:
    """How requests come: so many at once, or at random with a mean rate, however many there are then."""

    concurrency: int | None = None
    per_s: float | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.concurrency} at once" if self.per_s is None else f"{self.per_s:g} per second"


class Sender:
    """Sends completions of one model."""

    def __init__(self, client: ApiClient, model: str, ignore_eos: bool, temperature: float) -> None:
        """`ignore_eos` is a field of Baton's, vLLM's and SGLang's APIs, not of OpenAI's."""
        self._client = client
        self._body = {"model": model, "temperature": temperature}
        if ignore_eos:
            self._body["ignore_eos"] = True

    async def run(self, workload: Workload, load: Load, on_answer: Callable[[], None]) -> Measured:
        """Send all prompts. `on_answer` is called as each is answered, or has failed."""
        measured = Measured(load.name)
        start = time.perf_counter()
        if load.per_s is not None:
            await self._at_rate(workload, load.per_s, load.seed, measured, on_answer)
        else:
            await self._at_once(workload, load.concurrency or 1, measured, on_answer)
        measured.seconds = time.perf_counter() - start
        return measured

    async def _at_once(
        self, workload: Workload, concurrency: int, measured: Measured, on_answer: Callable[[], None]
    ) -> None:
        prompts = iter(workload.prompts)

        async def one_after_another() -> None:
            for prompt in prompts:  # shared by all: each takes the next
                await self._send(prompt, workload.output_tokens, measured)
                on_answer()

        await _all(one_after_another() for _ in range(concurrency))

    async def _at_rate(
        self, workload: Workload, per_s: float, seed: int, measured: Measured, on_answer: Callable[[], None]
    ) -> None:
        start = time.perf_counter()

        async def send_at(at: float, prompt: str) -> None:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            await self._send(prompt, workload.output_tokens, measured)
            on_answer()

        due = arrivals(len(workload.prompts), per_s, seed)
        await _all(send_at(at, prompt) for at, prompt in zip(due, workload.prompts, strict=True))

    async def _send(self, prompt: str, output_tokens: int, measured: Measured) -> None:
        answer = TimedAnswer(time.perf_counter())
        body = {**self._body, "prompt": prompt, "max_tokens": output_tokens}
        try:
            async for _ in self._client.stream("/v1/completions", body, answer):
                pass
        except AnswerFailed as failure:
            measured.failures.append(str(failure))
        else:
            measured.answers.append(answer)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first that raises ends the others."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
