"""Clients that split a stream with str.splitlines, as httpx does, read whole events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.api.event_ids import NoIds
from router.api.event_json import encode_event
from router.api.openai.answers import ChatStyle, CompletionStyle, SseWriter, Style
from router.api.openai.shown import Shown
from router.streams.generation import ChoiceCounts, Submission
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
