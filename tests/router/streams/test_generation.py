"""One request's choices between their rooms and the HTTP side. Rooms here only remember being stopped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import Interrupted, SlowClient, Unavailable
from router.api.collection import Collection
from router.api.event_ids import NoIds
from router.api.openai.answers import CompletionStyle, SseWriter
from router.api.openai.shown import Shown
from router.streams.generation import MOST_UNREAD, ChoiceCounts, ChoiceOutput, Generation, Submission
from router.text.tokenization import Tokenization
from tests.support.tokenizers import byte_fallback, byte_level
from wire.request import FinishReason, OutputDelta, SamplingParams, TokenLogprobs


class Request:
    """A streamed request of so many choices."""

    def __init__(self, model: Path, n: int = 1, stop: tuple[str, ...] = ()) -> None:
        detokenizers = Tokenization(model).detokenizers
        self.ends = 0
        self.stopped: list[str] = []  # reasons given for stopping all rooms
        self.left = False
        submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams(), n=n)
        self.writer = SseWriter(CompletionStyle(detokenizers, Shown()), submission, 1, NoIds())
        self.generation = Generation(submission, self.writer, self, self)
        self.outputs = [
            ChoiceOutput(counts, self.generation, detokenizers.make(), stop)
            for counts in self.generation.choices
        ]

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def leave(self) -> None:
        self.left = True

    def grew(self, choice: ChoiceCounts) -> None:
        assert choice.output_tokens

    def began(self, _: Generation) -> None:
        pass

    def ended(self, _: Generation) -> None:
        self.ends += 1


def gained(token: int, finish: FinishReason | None = None) -> OutputDelta:
    return OutputDelta([token], None, finish)


def events(taken: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in taken.decode().split("\n\n") if line]


def test_what_came_in_one_turn_is_sent_at_once_an_event_per_token(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first, second = request.outputs
        waiting = asyncio.create_task(request.generation.more())
        await asyncio.sleep(0)
        first.on_tokens(gained(70), 0)
        second.on_tokens(gained(71), 0)
        first.on_tokens(gained(72, FinishReason.LENGTH), 0)
        assert await waiting
        got = events(request.writer.take())
        assert [event["choices"][0]["index"] for event in got] == [0, 1, 0]
        assert [event["choices"][0]["finish_reason"] for event in got] == [None, None, "length"]
        second.on_tokens(gained(73, FinishReason.STOP), 0)
        assert await request.generation.more()
        assert len(events(request.writer.take())) == 1
        assert not await request.generation.more()
        assert (request.ends, request.stopped) == (1, [])
        assert request.generation.ends == ["length", "stop"]

    asyncio.run(run())


def test_a_client_that_does_not_read_ends_its_request_and_holds_a_bounded_buffer(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first = request.outputs[0]
        most = 0
        while not request.generation.ended:  # nobody takes
            first.on_tokens(gained(70), 0)
            most = max(most, request.writer.unread)
            assert most < MOST_UNREAD + 1000
        assert most > MOST_UNREAD
        (reason,) = request.stopped
        assert "wait for this client" in reason
        assert request.generation.ends == ["error", "error"]
        assert request.ends == 1
        assert await request.generation.more()  # what came before is still told
        assert len(request.writer.take()) == most
        with pytest.raises(SlowClient):
            await request.generation.more()

    asyncio.run(run())


def test_a_client_is_not_slow_because_much_comes_in_one_turn(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first, second = request.outputs
        told = 0
        for _ in range(2):
            waiting = asyncio.create_task(request.generation.more())
            await asyncio.sleep(0)
            while request.writer.unread < 2 * MOST_UNREAD:
                first.on_tokens(gained(70), 0)
                told += 1
            assert await waiting
            assert request.writer.take()
        first.on_tokens(gained(70, FinishReason.LENGTH), 0)
        second.on_tokens(gained(70, FinishReason.LENGTH), 0)
        assert await request.generation.more()
        assert request.generation.complete
        assert request.generation.output_tokens() == told + 2

    asyncio.run(run())


def test_stop_strings_are_not_looked_for_in_tokens_that_only_a_parser_reads(tmp_path: Path) -> None:
    tokenization = Tokenization(byte_level(tmp_path))
    marker, before, after = tokenization.added_ids()["<|im_start|>"], *map(tokenization.encode, ("a", ">b<c"))
    kept = frozenset({marker})
    submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams(), kept_special=kept)
    request = Request(tmp_path)
    generation = Generation(submission, Collection(1), request, request)
    detokenizer = tokenization.detokenizers.make(kept=kept)
    output = ChoiceOutput(generation.choices[0], generation, detokenizer, ("<", "a>", ">>"))
    text, delta, stopped = output.read(OutputDelta([*before, marker, *after]))
    assert (text, stopped) == ("a<|im_start|>>b", True)
    assert delta.matched == "<"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("min_tokens", "stop", "want", "stopped"),
    [
        (0, "b", "a", True),
        (1, "b", "a", True),
        (2, "b", "abca", True),
        (2, "bc", "a", True),  # it ends behind them
        (3, "bc", "abcab", False),
        (5, "b", "abcab", False),
        (5, "bx", "abcab", False),  # held back, and no stop string at the end
    ],
)
def test_stop_strings_wait_for_min_tokens(
    model: Path, min_tokens: int, stop: str, want: str, stopped: bool, at_once: bool
) -> None:
    tokenization, request = Tokenization(model), Request(model)
    sampling = SamplingParams(min_tokens=min_tokens)
    submission = Submission(request_id="r", prompts=[[1]], sampling=sampling)
    generation = Generation(submission, Collection(1), request, request)
    output = ChoiceOutput(generation.choices[0], generation, tokenization.detokenizers.make(), (stop,))
    tokens = [token for letter in "abcab" for token in tokenization.encode(letter)]
    assert len(tokens) == 5
    deltas = [OutputDelta(tokens, finish=FinishReason.LENGTH)]
    if not at_once:
        deltas = [OutputDelta([token]) for token in tokens[:-1]]
        deltas.append(OutputDelta(tokens[-1:], finish=FinishReason.LENGTH))
    text = ""
    for delta in deltas:
        more, _, hit = output.read(delta)
        text += more
        if hit:
            break
    assert (text, hit) == (want, stopped)


@pytest.mark.parametrize("min_tokens", [0, 1])
def test_so_does_one_in_the_unfinished_character_at_the_end(min_tokens: int, tmp_path: Path) -> None:
    tokenization, request = Tokenization(byte_level(tmp_path)), Request(tmp_path)
    first, *_ = tokenization.encode("\U0001f600")
    submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams(min_tokens=min_tokens))
    generation = Generation(submission, Collection(1), request, request)
    output = ChoiceOutput(generation.choices[0], generation, tokenization.detokenizers.make(), ("\ufffd",))
    text, _, _ = output.read(OutputDelta([first], finish=FinishReason.LENGTH))
    assert text == "\ufffd" * min_tokens


def test_stop_strings_are_not_looked_for_in_heads_that_only_a_parser_reads(tmp_path: Path) -> None:
    tokenization = Tokenization(byte_level(tmp_path))
    added, encode = tokenization.added_ids(), tokenization.encode
    head, message = added["<|im_start|>"], added["<|im_end|>"]
    submission = Submission(
        request_id="r",
        prompts=[[1]],
        sampling=SamplingParams(),
        kept_special=frozenset({head, message}),
        unsaid_behind=frozenset({head}),
    )
    request = Request(tmp_path)
    generation = Generation(submission, Collection(1), request, request)
    detokenizer = tokenization.detokenizers.make(kept=submission.kept_special)
    output = ChoiceOutput(generation.choices[0], generation, detokenizer, ("final",))
    tokens = [head, *encode("final"), message, *encode("It is"), *encode(" final."), *encode("no")]
    texts, stops = [], []
    for token in tokens:
        text, _, stopped = output.read(OutputDelta([token]))
        texts.append(text)
        stops.append(stopped)
    assert "".join(texts[: stops.index(True) + 1]) == "<|im_start|>final<|im_end|>It is "


def test_a_choice_that_fails_stops_the_others_after_what_came_before(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        first, second = request.outputs
        first.on_tokens(gained(70), 0)
        second.on_error(Unavailable("gone"))
        assert await request.generation.more()
        with pytest.raises(Unavailable):
            await request.generation.more()
        assert "gone" in request.stopped[0]

    asyncio.run(run())


def test_an_interrupted_request_leaves_its_rooms(model: Path) -> None:
    async def run() -> None:
        request = Request(model, n=2)
        request.outputs[0].on_tokens(gained(70), 0)
        request.generation.interrupt(Interrupted("shutting down"))
        assert await request.generation.more(), "what came before is still told"
        with pytest.raises(Interrupted):
            await request.generation.more()
        assert (request.left, request.stopped, request.ends) == (True, [], 1)

    asyncio.run(run())


def test_who_waits_is_woken_at_the_end_though_the_observer_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(self: Request, _: Generation) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Request, "ended", ended)

    async def run() -> None:
        whole, failed = Request(model), Request(model)
        waiting = [asyncio.create_task(request.generation.more()) for request in (whole, failed)]
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="a bug"):
            whole.outputs[0].on_tokens(gained(70, FinishReason.LENGTH), 0)
        with pytest.raises(ValueError, match="a bug"):
            failed.outputs[0].on_error(Unavailable("gone"))
        async with asyncio.timeout(5):
            assert await waiting[0]
            with pytest.raises(Unavailable):
                await waiting[1]
        assert not await whole.generation.more()

    asyncio.run(run())


def test_a_stop_string_ends_a_choice_with_the_token_that_completes_it(model: Path) -> None:
    async def run() -> None:
        tokenization = Tokenization(model)
        tokens = tokenization.encode("one two three four")
        text = tokenization.decode(tokens)
        stop = text[5:9]
        request = Request(model, stop=(stop,))
        wanted_no_more = request.outputs[0].on_tokens(OutputDelta(tokens), 3)
        assert wanted_no_more
        (event,) = events(request.writer.take())
        assert event["choices"][0]["text"] == text[: text.index(stop)]
        assert event["choices"][0]["finish_reason"] == "stop"
        (counts,) = request.generation.choices
        kept = tokenization.decode(tokens[: counts.output_tokens])
        assert stop in kept
        assert stop not in tokenization.decode(tokens[: counts.output_tokens - 1])
        assert counts.cached_tokens == 3
        assert request.generation.complete

    asyncio.run(run())


def test_only_an_accepted_request_that_waits_is_found_quiet(model: Path) -> None:
    async def run() -> None:
        request = Request(model)
        (output,), generation = request.outputs, request.generation
        waiting = asyncio.create_task(generation.more())
        for _ in range(3):
            await asyncio.sleep(0)
            generation.check_quiet()
        assert not waiting.done(), "it may still be refused, with an HTTP status of its own"
        output.on_admitted()
        generation.check_quiet()
        assert await waiting
        assert generation.quiet
        waiting = asyncio.create_task(generation.more())
        await asyncio.sleep(0)
        generation.check_quiet()
        await asyncio.sleep(0)
        assert not waiting.done(), "it waits since after the last check"
        generation.check_quiet()
        output.on_tokens(gained(70), 0)
        assert await waiting
        assert not generation.quiet, "a token came before the task ran"
        for token in range(5):
            generation.check_quiet()
            output.on_tokens(gained(token), 0)
            assert await generation.more()
            assert not generation.quiet
        generation.check_quiet()
        output.on_tokens(gained(1, FinishReason.LENGTH), 0)
        assert await generation.more()
        assert not await generation.more()

    asyncio.run(run())


def test_the_token_that_stops_is_no_part_of_the_text(model: Path) -> None:
    async def run() -> None:
        request = Request(model)
        request.outputs[0].on_tokens(OutputDelta([70, 71], None, FinishReason.STOP), 0)
        (event,) = events(request.writer.take())
        assert event["choices"][0]["text"] == Tokenization(model).decode([70])
        assert request.generation.output_tokens() == 2

    asyncio.run(run())


def test_a_stop_string_cuts_logprobs_with_their_tokens(model: Path) -> None:
    class Seen:
        unread = 0

        def add(self, choice: object, text: str, delta: OutputDelta) -> None:
            self.delta = delta

    async def run() -> None:
        seen, detokenizers = Seen(), Tokenization(model).detokenizers
        submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams())
        generation = Generation(submission, seen, lambda _: None, Request(model))
        stop = Tokenization(model).decode([71])
        output = ChoiceOutput(generation.choices[0], generation, detokenizers.make(), (stop,))
        assert output.on_tokens(OutputDelta([70, 71, 72], [TokenLogprobs(-float(i)) for i in range(3)]), 0)
        assert seen.delta.tokens == [70, 71]
        assert seen.delta.logprobs == [TokenLogprobs(-0.0), TokenLogprobs(-1.0)]

    asyncio.run(run())


@pytest.mark.parametrize("keep", [False, True])
def test_the_token_that_ends_an_answer_is_in_the_text_if_it_is_kept(model: Path, keep: bool) -> None:
    tokenization = Tokenization(model)
    tokens = tokenization.encode("a b c")
    request = Request(model)
    detokenizer = tokenization.detokenizers.make()
    output = ChoiceOutput(request.generation.choices[0], request.generation, detokenizer, (), keep)
    text, delta, stopped = output.read(OutputDelta(tokens, finish=FinishReason.STOP))
    assert text == tokenization.decode(tokens if keep else tokens[:-1])
    assert (delta.tokens, delta.matched, stopped) == (tokens, tokens[-1], False)


@pytest.mark.parametrize("echo", [False, True])
def test_an_output_keeps_the_space_with_which_it_goes_on(tmp_path: Path, echo: bool) -> None:
    """Also where tokenizers leave out the space at the beginning of a text."""
    tokenization = Tokenization(byte_fallback(tmp_path / "model"))
    prompt, tokens = tokenization.encode("The quick brown"), tokenization.encode("fox", False)
    submission = Submission(request_id="r", prompts=[prompt], sampling=SamplingParams(top_logprobs=0))
    scores = [TokenLogprobs(-1.0)] * len(tokens)
    delta = OutputDelta(
        tokens, scores, FinishReason.LENGTH, prompt_logprobs=[TokenLogprobs(-1.0)] * (len(prompt) - 1)
    )
    detokenizers, collection = tokenization.detokenizers, Collection(1)
    style = CompletionStyle(detokenizers, Shown(logprobs=True), ["The quick brown"] if echo else None)
    streamed = SseWriter(style, submission, 1, NoIds())
    for answer in (collection, streamed):
        generation = Generation(submission, answer, Request(tmp_path / "model"), Request(tmp_path / "model"))
        ChoiceOutput(generation.choices[0], generation, detokenizers.make(), ()).on_tokens(delta, 0)
    choice = style.choice(generation.choices[0], collection.choices[0], submission)
    assert choice["text"] == ("The quick brown fox" if echo else " fox")
    ends = [*choice["logprobs"]["text_offset"][1:], len(choice["text"])]
    spans = zip(choice["logprobs"]["text_offset"], ends, strict=True)
    named = [choice["text"][start:end] for start, end in spans]
    assert named[-len(tokens) :] == choice["logprobs"]["tokens"][-len(tokens) :]
    (event,) = events(streamed.take())
    assert event["choices"][0]["text"] == choice["text"]
    if not echo:
        assert event["choices"][0]["logprobs"] == choice["logprobs"]
