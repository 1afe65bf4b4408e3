"""A choice that is resumed says exactly what is missing, however its tokens are cut into runs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from router.api.event_ids import NoIds
from router.api.openai.answers import CompletionStyle, SseWriter
from router.api.openai.shown import Shown
from router.streams.generation import ChoiceCounts, ChoiceOutput, Generation, Submission
from router.streams.resume import ChoicePosition
from router.streams.resumed_output import Resumed, ResumedOutput
from router.text.tokenization import Tokenization
from tests.router.streams.test_generation import events
from wire.request import FinishReason, OutputDelta, SamplingParams

ROUNDS = 300


class Observer:
    """Implements RequestRooms and GenerationObserver: nothing is there to be stopped."""

    def stop(self, reason: str) -> None: ...
    def leave(self) -> None: ...
    def began(self, _: Generation) -> None: ...
    def grew(self, choice: ChoiceCounts) -> None: ...
    def ended(self, _: Generation) -> None: ...


class Stream:
    """One choice, from the tokens to the events."""

    def __init__(self, tokenization: Tokenization, stop: tuple[str, ...], known: int | None = None) -> None:
        """`known`: the tokens that the client has; None: the stream is not a resumed one."""
        detokenizers = tokenization.detokenizers
        submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams())
        self.writer = SseWriter(CompletionStyle(detokenizers, Shown()), submission, 1, NoIds())
        self.generation = Generation(submission, self.writer, Observer(), Observer())
        (self.counts,) = self.generation.choices
        output = ChoiceOutput(self.counts, self.generation, detokenizers.make(), stop)
        resumed = Resumed([ChoicePosition(known or 0)], self.writer.replay, {})
        self.sink = output if known is None else ResumedOutput(output, self.counts, self.generation, resumed)
        self.texts: list[str] = []
        self.finish: str | None = None

    def push(self, delta: OutputDelta) -> bool:
        """Whether the choice has ended."""
        stopped = self.sink.on_tokens(delta, 0)
        for event in events(self.writer.take()):
            assert self.finish is None, "nothing follows the end"
            self.texts.append(event["choices"][0]["text"])
            self.finish = event["choices"][0]["finish_reason"]
        return stopped or delta.finish is not None


def runs(tokens: list[int], finish: FinishReason, draw: random.Random) -> list[OutputDelta]:
    """The tokens, cut at random."""
    deltas, start = [], 0
    while start < len(tokens):
        end = min(len(tokens), start + draw.choice((1, 1, 1, 2, 3, 7, 40)))
        deltas.append(OutputDelta(tokens[start:end], None, finish if end == len(tokens) else None))
        start = end
    return deltas


@pytest.mark.parametrize("seed", range(4))
def test_text_before_and_after_the_cut_is_the_whole_text(model: Path, seed: int) -> None:
    tokenization, draw = Tokenization(model), random.Random(seed)

    async def run() -> None:
        for _ in range(ROUNDS):
            tokens = [draw.randrange(256) for _ in range(draw.randint(1, 40))]
            text = tokenization.decode(tokens)
            at = draw.randrange(len(text)) if text else 0
            stop = (text[at : at + draw.randint(1, 4)] or "x",) if draw.random() < 0.6 else ()
            finish = draw.choice((FinishReason.LENGTH, FinishReason.STOP))
            whole = Stream(tokenization, stop)
            after: list[tuple[int, int]] = []  # (tokens, events) after each run
            for delta in runs(tokens, finish, draw):
                ended = whole.push(delta)
                after.append((whole.counts.output_tokens, len(whole.texts)))
                if ended:
                    break
            for known, sent in [(0, 0), *after[:-1]]:
                again = Stream(tokenization, stop, known)
                assert any(again.push(delta) for delta in runs(tokens, finish, draw))
                assert "".join(whole.texts[:sent] + again.texts) == "".join(whole.texts)
                assert again.finish == whole.finish
                assert again.counts.output_tokens == whole.counts.output_tokens

    asyncio.run(run())
