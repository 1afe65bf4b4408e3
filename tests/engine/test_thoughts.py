"""Thoughts that end after so many tokens, against transformers.generate with the same tokens forced."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

from common.errors import InvalidRequest
from engine.errors import NothingAllowed
from engine.sampling_state import SamplingState
from engine.thoughts import ThoughtState
from scheduler.req import Req, RequestLimits
from tests.support.driver import Driver, open_runner
from tests.support.reference import generate_with
from tests.support.tiny_models import make_tiny, write_tokenizer
from wire.codec import pack_tokens
from wire.request import GenerateRequest, Grammar, GrammarKind, SamplingParams, ThoughtLimit

OPEN, CLOSE, END = 1, 7, 8
EOS = 258


def said(limit: ThoughtLimit, model: list[int]) -> list[int]:
    """The output when a model would say these tokens if it were free to."""
    state, outputs = ThoughtState(limit), []
    for position, token in enumerate(model):
        forced = state.forced(outputs, position, None)
        if position and forced is not None:
            assert state.forced(outputs[:-1], position, outputs[-1]) == forced, "its result was not taken yet"
        outputs.append(token if forced is None else forced)
    return outputs


CASES: list[tuple[ThoughtLimit, list[int], list[int]]] = [
    (ThoughtLimit(2, (CLOSE,)), [3, 4, 5, 6], [3, 4, CLOSE, 6]),
    (ThoughtLimit(0, (CLOSE,)), [3, 4], [CLOSE, 4]),
    (ThoughtLimit(2, (CLOSE,)), [3, CLOSE, 5, 6], [3, CLOSE, 5, 6]),
    (ThoughtLimit(2, (CLOSE,)), [3, 4, CLOSE, 6], [3, 4, CLOSE, 6]),
    (ThoughtLimit(1, (CLOSE,), (OPEN,)), [OPEN, 3, 4, 5], [OPEN, 3, CLOSE, 5]),
    (ThoughtLimit(1, (CLOSE,), (OPEN,)), [3, OPEN, 4, 5], [3, OPEN, 4, 5]),
    (ThoughtLimit(2, (CLOSE, END)), [3, 4, 5, 6, 9], [3, 4, CLOSE, END, 9]),
    (ThoughtLimit(2, (CLOSE, END)), [3, CLOSE, 5, 6, 9], [3, CLOSE, END, 6, 9]),
    (ThoughtLimit(3, (CLOSE, END)), [CLOSE, END, 5, 6, 9], [CLOSE, END, 5, 6, 9]),
    (ThoughtLimit(2, (CLOSE, CLOSE, END)), [3, CLOSE, 4, 5, 9], [3, CLOSE, CLOSE, END, 9]),
    (ThoughtLimit(2, (CLOSE, END), (OPEN, OPEN)), [OPEN, 3, 4, 5, 6, 9], [OPEN, 3, 4, 5, 6, 9]),
]


@pytest.mark.parametrize(("limit", "model", "want"), CASES)
def test_what_is_said(limit: ThoughtLimit, model: list[int], want: list[int]) -> None:
    assert said(limit, model) == want


@given(
    tokens=st.integers(0, 6),
    closing=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    model=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_thoughts_end_once_and_in_time(tokens: int, closing: list[int], model: list[int]) -> None:
    outputs = said(ThoughtLimit(tokens, tuple(closing)), model)
    ends = [i for i in range(len(outputs)) if outputs[i : i + len(closing)] == closing]
    assert ends, "they end"
    assert ends[0] <= tokens
    changed = [i for i, (one, other) in enumerate(zip(outputs, model, strict=True)) if one != other]
    assert all(ends[0] <= i < ends[0] + len(closing) for i in changed), "nothing else is forced"


def test_a_token_that_is_not_known_is_not_guessed() -> None:
    state = ThoughtState(ThoughtLimit(3, (CLOSE,)))
    assert state.forced([], 2, None) is None
    with pytest.raises(NothingAllowed):
        state.forced([1, 2], 3, None)
    with pytest.raises(NothingAllowed):
        ThoughtState(ThoughtLimit(3, (CLOSE, END))).forced([1, 2], 4, 5)  # the token before is another one


@pytest.mark.parametrize(
    "limit",
    [ThoughtLimit(3, ()), ThoughtLimit(3, (1,) * 65), ThoughtLimit(3, (500,)), ThoughtLimit(3, (1,), (500,))],
)
def test_what_no_model_can_say_is_refused(limit: ThoughtLimit) -> None:
    request = GenerateRequest(
        request_id="r", room=1, epoch=0, prompt=pack_tokens([1, 2]), sampling=SamplingParams(thoughts=limit)
    )
    with pytest.raises(InvalidRequest, match="thoughts"):
        Req.from_request(request, "m", RequestLimits(100, 300, ()))


# -- against transformers --------------------------------------------------------------------------------


class Forced(LogitsProcessor):
    """Forces what a limit does to thoughts that begin with the output."""

    def __init__(self, limit: ThoughtLimit, prompt_len: int) -> None:
        self._tokens, self._closing = limit.tokens, list(limit.closing)
        self._prompt_len = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        outputs = input_ids[0, self._prompt_len :].tolist()
        count = len(self._closing)
        ended = any(outputs[i : i + count] == self._closing for i in range(len(outputs)))
        if len(outputs) < self._tokens or ended:
            return scores
        said = max(n for n in range(count) if outputs[len(outputs) - n :] == self._closing[:n])
        only = torch.full_like(scores, -torch.inf)
        only[0, self._closing[said]] = scores[0, self._closing[said]]
        return only


def reference(path: Path, prompt: list[int], limit: ThoughtLimit | None, n: int) -> list[int]:
    forced = [] if limit is None else [Forced(limit, len(prompt))]
    return generate_with(path, prompt, n, logits_processor=LogitsProcessorList(forced))


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_generate_with_the_same_tokens_forced(
    tmp_path: Path, overlap: bool, unknown: bool
) -> None:
    path, n = make_tiny("qwen3", tmp_path, 3), 16
    rng = random.Random(6)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 33, 20, 9)]
    free = reference(path, prompts[2], None, n)
    limits = [ThoughtLimit(5, (CLOSE,)), ThoughtLimit(0, (CLOSE,)), ThoughtLimit(9, (free[4],)), None]
    runner, _ = open_runner(path, 16, 60, overlap=overlap)
    driver = Driver(runner, 60, 16)
    lanes = [
        driver.add(prompt, SamplingParams(temperature=0.0, thoughts=limit))
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    ours = driver.each_step(lanes, n, unknown)
    runner.close()
    want = [reference(path, prompt, limit, n) for prompt, limit in zip(prompts, limits, strict=True)]
    assert ours == want
    assert (ours[0][5], ours[1][0]) == (CLOSE, CLOSE)
    assert ours[2] == free, "these end by themselves"


def test_a_grammar_goes_on_behind_them(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path, 3)
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    (seven,) = tokenizer.encode("7").ids
    runner, _ = open_runner(path, 16, 60, overlap=False)
    driver = Driver(runner, 60, 16)
    body = Grammar(GrammarKind.LARK, 'start: /[a-z]*/ "7" /[0-9]{4}/ "x"')
    params = SamplingParams(temperature=0.0, grammar=body, thoughts=ThoughtLimit(6, (seven,)))
    lane = driver.add([5, 6, 7], params)
    lane.state = SamplingState(
        params, np.array([5, 6, 7], np.int32), (EOS,), 0, lane.state.outputs, runner.grammars.begin(params)
    )
    driver.generate([lane], 12)
    runner.close()
    text = tokenizer.decode(lane.outputs[: (*lane.outputs, EOS).index(EOS)])
    assert lane.outputs.index(seven) == 6, "the model would go on"
    _, _, rest = text.partition("7")
    assert rest[:4].isdigit()
    assert rest[4:] == "x"
