"""Clients that split a stream with str.splitlines, as httpx does, read whole events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from router.api.event_ids import EventIds, NoIds
from router.api.event_json import encode_event
from router.api.native_answers import NativeEvents
from router.api.openai.answers import ChatStyle, CompletionStyle, SseWriter, Style
from router.api.openai.shown import Shown
from router.streams.generation import ChoiceCounts, Submission
from router.streams.resume import ChoicePosition
from router.text.tokenization import Tokenization
from wire.request import FinishReason, OutputDelta, SamplingParams

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@given(st.text(st.sampled_from(LINE_ENDS + 'é€\\"') | st.characters(codec="utf-8")))
@example(LINE_ENDS)
@example("\\\u2028")
def test_one_line_and_the_same_value(text: str) -> None:
    (line,) = encode_event({"text": text}).decode().splitlines()
    assert json.loads(line) == {"text": text}


@pytest.mark.parametrize("style", [ChatStyle, CompletionStyle])
def test_events_are_whole_lines(style: type[Style], model: Path) -> None:
    submission = Submission(request_id="1", prompts=[[1]], sampling=SamplingParams())
    writer = SseWriter(style(Tokenization(model).detokenizers, Shown()), submission, 0, NoIds())
    for finish in (None, FinishReason.STOP):
        writer.add(ChoiceCounts(0), LINE_ENDS, OutputDelta([1], finish=finish))
        data, end = writer.take().decode().splitlines()
        choice = json.loads(data.removeprefix("data: "))["choices"][0]
        assert (choice["delta"]["content"] if style is ChatStyle else choice["text"]) == LINE_ENDS
        assert end == ""


@pytest.mark.parametrize("ids", [NoIds(), EventIds(lambda: "token", [ChoicePosition()])])
def test_a_comment_is_no_event_to_an_openai_client(ids: EventIds, model: Path) -> None:
    """With an id before it or without one; after it as before it."""
    submission = Submission(request_id="1", prompts=[[1]], sampling=SamplingParams())
    style = CompletionStyle(Tokenization(model).detokenizers, Shown())
    for answer in (SseWriter(style, submission, 0, ids), NativeEvents(submission, ids)):
        sent = answer.waiting
        for finish in (None, None, FinishReason.STOP):
            answer.add(ChoiceCounts(0), "a", OutputDelta([1], finish=finish))
            sent += answer.take() + answer.waiting
        read = list(SSEDecoder().iter_bytes(iter([sent])))
        assert len(read) == 3
        assert all(json.loads(event.data) for event in read)
        assert sent.decode().splitlines().count(": waiting") == 4
