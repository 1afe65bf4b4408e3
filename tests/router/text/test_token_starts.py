"""How many tokens of an output are thoughts, however its tokens come."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.answer_parts import AnswerParts
from router.api.collection import Collection
from router.streams.generation import ChoiceCounts, ChoiceOutput, Generation, Submission
from router.text.output_formats import OutputFormats
from router.text.tokenization import Tokenization
from router.text.tool_formats import harmony
from tests.router.streams.test_resumed_output import Observer
from tests.support.tokenizers import byte_level
from wire.request import FinishReason, OutputDelta, SamplingParams

THINK = "<think></think>"
HARMONY = "".join(harmony.MARKERS)
HEAD, MORE = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>"
CALL = f"{MORE}commentary to=functions.f<|message|>{{}}<|call|>"
CASES: dict[str, tuple[str, list[str]]] = {
    "one": (THINK, ["", "<think>\nHm, so.\n</think>", "\n\nYes."]),
    "an unfinished one": (THINK, ["", "<think>Hm, s"]),
    "none": (THINK, ["Yes, <think>I do</think>."]),
    "an empty one": (THINK, ["", "<think></think>", "Yes."]),
    "around a call": (HARMONY, [HEAD, "Hm.<|end|>", f"{CALL}{MORE}analysis<|message|>", "Well"]),
    "before an answer": (HARMONY, [HEAD, "So.<|end|>", f"{MORE}final<|message|>Yes."]),
}
"""A template, and an output in parts, of which every other one is a thought. In channels the head is not of
the thought: it tells only at its end what follows."""


class Parts:
    """Implements Answer: reads the parts of one choice."""

    unread = 0

    def __init__(self, parts: AnswerParts) -> None:
        self.parts = parts

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        self.parts.take(text, delta)


def counted(tokenization: Tokenization, template: str, deltas: list[OutputDelta]) -> tuple[int, int]:
    """By a parser that reads while the output comes, and by one that reads it as a whole."""
    formats = OutputFormats(template, tokenization.added_ids(), ())
    parsing = formats.parsing("", {})
    assert parsing is not None
    submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams())
    collection, reader = Collection(1), Parts(AnswerParts(parsing, 0))
    for answer in (collection, reader):
        generation = Generation(submission, answer, Observer(), Observer())
        output = ChoiceOutput(generation.choices[0], generation, tokenization.detokenizers.make(), ())
        for delta in deltas:
            output.on_tokens(delta, 0)
    (choice,) = collection.choices
    parser = parsing.parser(0)
    parser.feed(choice.text)
    parser.end()
    return reader.parts.reasoning_tokens, choice.starts.between(parser.thought_bounds)


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    return Tokenization(byte_level(tmp_path_factory.mktemp("tokens")))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_thoughts_are_counted_however_tokens_come(
    tokenization: Tokenization, case: str, data: st.DataObject
) -> None:
    template, texts = CASES[case]
    parts = [tokenization.encode(text, add_special_tokens=False) for text in texts]
    left, deltas = [*chain(*parts), 0], []  # and the end
    while left:
        count = data.draw(st.integers(1, len(left)))
        finish = FinishReason.STOP if count == len(left) else None
        deltas.append(OutputDelta(left[:count], None, finish))
        left = left[count:]
    thoughts = sum(map(len, parts[1::2]))
    assert counted(tokenization, template, deltas) == (thoughts, thoughts)
