"""Events of /generate repeat all that was said before, so few of them have to wait for a client."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from router.api.event_ids import NoIds
from router.api.native_answers import NativeEvents
from router.streams.generation import MOST_UNREAD, ChoiceCounts, Generation, Submission
from wire.request import FinishReason, OutputDelta, SamplingParams, TokenLogprobs


class Request:
    """A streamed request, which observes itself. Its outputs are letters."""

    def __init__(self, n: int, top: int | None) -> None:
        sampling = SamplingParams(top_logprobs=top)
        submission = Submission(request_id="r", prompts=[[1]], sampling=sampling, n=n)
        self.events = NativeEvents(submission, NoIds())
        self.generation = Generation(submission, self.events, self, self)
        self.rng = random.Random(n)
        self.said: list[list[OutputDelta]] = [[] for _ in range(n)]

    def gain(self, choice: int, finish: FinishReason | None = None) -> None:
        """One token."""
        counts, top = self.generation.choices[choice], self.generation.submission.sampling.top_logprobs
        logprobs = None
        if top is not None:
            best = [(self.rng.randrange(100_000), -self.rng.random()) for _ in range(top)]
            logprobs = [TokenLogprobs(-self.rng.random(), best)]
        delta = OutputDelta([self.rng.randrange(100_000)], logprobs, finish)
        self.said[choice].append(delta)
        counts.output_tokens += 1
        self.generation.add(counts, "x", delta)

    def expected(self, choice: int) -> dict[str, Any]:
        """What the newest event of a choice says of its output."""
        said = self.said[choice]
        pairs = [(one.tokens[0], one.logprobs[0]) for one in said if one.logprobs is not None]
        return {
            "text": "x" * len(said),
            "output_ids": [one.tokens[0] for one in said],
            "output_token_logprobs": [[entry.logprob, token, None] for token, entry in pairs],
            "output_top_logprobs": [[[lp, other, None] for other, lp in entry.top] for _, entry in pairs],
        }

    def stop(self, reason: str) -> None: ...

    def leave(self) -> None: ...

    def began(self, generation: Generation) -> None: ...

    def grew(self, choice: ChoiceCounts) -> None: ...

    def ended(self, generation: Generation) -> None: ...


def told(taken: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in taken.decode().split("\n\n") if line]


def output(event: dict[str, Any]) -> dict[str, Any]:
    meta = event["meta_info"]
    names = ("output_token_logprobs", "output_top_logprobs")
    return {"text": event["text"], "output_ids": event["output_ids"], **{name: meta[name] for name in names}}


@pytest.mark.parametrize("n", [1, 3])
def test_the_newest_events_are_enough_for_a_client_that_is_behind(n: int) -> None:
    request = Request(n, top=5)
    for at in range(1500):
        request.gain(at % n)
        if at == 4:  # few events: each token has its own
            assert [output(one)["text"] for one in told(request.events.take())] == [
                "x" * (1 + at // n) for at in range(5)
            ]
    waiting = request.events.events
    assert sum(map(len, waiting)) < (1 << 18) + (n + 1) * max(map(len, waiting))
    for choice in range(n):
        request.gain(choice, FinishReason.LENGTH)
    newest = {event["index"]: event for event in told(request.events.take())}
    for choice in range(n):
        assert output(newest[choice]) == request.expected(choice)
        assert newest[choice]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_client_is_not_slow_for_the_length_of_one_event() -> None:
    async def run() -> None:
        request = Request(1, top=20)
        longest = 0
        while longest <= MOST_UNREAD:
            request.gain(0)
            assert await request.generation.more()
            longest = len(request.events.take())
            # It is sent while two more tokens come.
            request.gain(0)
            request.gain(0)
            assert request.generation.error is None
        request.generation.cancel()

    asyncio.run(run())
