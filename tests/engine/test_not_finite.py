"""A sequence whose numbers are not finite fails alone, and what it leaves behind harms nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.batch import SamplingRows
from engine.runner import ModelRunner
from engine.sampler import Sampled, Sampler
from engine.sampling_state import SamplingState
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import GREEDY, Driver, Lane, open_pools, open_runner
from wire.request import SamplingParams

FAMILIES = ("llama", "qwen3", "qwen3_moe", "mistral_window", "gpt_oss", "deepseek_v2", "qwen3_next", "lfm2")
PAGES = 60


def poison(runner: ModelRunner, token: int, value: float) -> None:
    """From now on the embedding of that token is not finite."""

    def spoil(_module: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[inputs[0] == token, 3] = value
        return output

    runner.forward.decoder.embed_tokens.register_forward_hook(spoil)


def unused_token(expected: Sequence[Sequence[int]]) -> int:
    return next(token for token in range(256, 320) if all(token not in answer for answer in expected))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bad_sequence_fails_alone_and_its_pages_harm_nobody(
    family: str, value: float, drawn: Drawn
) -> None:
    path, expected = drawn(family)
    bad_token = unused_token(expected)
    runner, _ = open_pools(path, 16, PAGES, attention="auto")
    poison(runner, bad_token, value)
    driver = Driver(runner, PAGES, 16)
    first, last = driver.add(PROMPTS[0]), driver.add(PROMPTS[2])
    bad = driver.add([*PROMPTS[1][:20], bad_token, *PROMPTS[1][20:]])
    result = driver.step([(first, 5), (bad, bad.prompt_len), (last, 64)])
    assert list(result.failures) == [1]
    assert "not finite" in result.failures[1]
    for _ in range(8):
        result = driver.step([(first, 1), (bad, 1), (last, 1)])
        assert list(result.failures) == [1]
    assert first.outputs == expected[0][:9]
    assert last.outputs == expected[2][:9]

    give_back(driver, bad)  # the next sequences get its pages, with what is in them
    after = [driver.add(PROMPTS[1]), driver.add(PROMPTS[0])]
    driver.generate(after, 20)
    runner.close()
    assert [lane.outputs for lane in after] == [expected[1][:20], expected[0][:20]]


def give_back(driver: Driver, lane: Lane) -> None:
    """The pages and the state of a lane are the next that the driver hands out."""
    driver._free.extend(lane.pages)
    driver._free_window.extend(page for page in lane.window_pages if page)
    driver._free_states.extend(slot for slot in {lane.state_slot, lane.next_slot} if slot)


def test_a_chunk_that_samples_nothing_fails_too(drawn: Drawn) -> None:
    """Its pages would be cached before any logits show what is in them."""
    path, expected = drawn("llama")
    runner, _ = open_runner(path, 16, 40)
    bad_token = unused_token(expected)
    poison(runner, bad_token, math.nan)
    driver = Driver(runner, 40, 16)
    good, bad = driver.add(PROMPTS[2]), driver.add([1, 2, bad_token, *PROMPTS[2]])
    result = driver.step([(good, 30), (bad, 30)])
    runner.close()
    assert list(result.failures) == [1]
    assert len(result.tokens) == 0


@pytest.mark.covering
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "torch"), ("float32", "auto"), ("bfloat16", "auto")])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_in_unwritten_memory_changes_nothing(
    family: str, dtype: str, kind: str, drawn: Drawn
) -> None:
    """Pages and slots are freed with whatever a failed request left in them: here all of it is NaN."""
    path, _ = drawn(family)
    outputs = []
    for garbage in (0, 255):  # 255: NaN in every dtype
        runner, pools = open_pools(path, 16, PAGES, dtype=dtype, attention=kind, linear=kind)
        for pool in pools.values():
            pool.bytes.fill_(garbage)
        driver = Driver(runner, PAGES, 16)
        lanes = [driver.add(prompt) for prompt in PROMPTS]
        driver.generate(lanes, 20, chunk=13, stagger=2)
        runner.close()
        outputs.append([lane.outputs for lane in lanes])
    assert outputs[0] == outputs[1]


def sample(logits: torch.Tensor, *params: SamplingParams) -> Sampled:
    states = tuple(SamplingState(each, np.array([1, 2], np.int32), ()) for each in params)
    positions = np.zeros(len(params), dtype=np.int64)
    sampler = Sampler(logits.shape[1], torch.device("cpu"))
    return sampler.sample(logits, SamplingRows(states, positions), torch.from_numpy(positions)).wait()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, top_logprobs=2)])
def test_logits_of_the_model_that_are_not_finite(value: float, params: SamplingParams) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    alone = [sample(logits[i : i + 1], params).tokens[0] for i in (0, 2)]
    logits[1, 17] = value
    result = sample(logits, params, params, params)
    assert list(result.failures) == [1]
    assert "the model's logits" in result.failures[1]
    assert [result.tokens[0], result.tokens[2]] == alone
    assert 0 <= result.tokens[1] < 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_the_parameters_made_infinite(temperature: float) -> None:
    """No router and no worker lets such parameters pass."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    biased = SamplingParams(temperature=temperature, logit_bias={4: math.inf})
    result = sample(logits, biased, GREEDY)
    assert list(result.refusals) == [0]
    assert "no token may be sampled" in result.refusals[0]
    assert result.tokens[1] == int(logits[1].argmax())


def test_when_no_token_may_be_sampled() -> None:
    nothing = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=tuple(range(50)))
    result = sample(torch.zeros(2, 50), nothing, GREEDY)
    assert (list(result.refusals), result.failures) == ([0], {})


def test_a_row_whose_parameters_cannot_be_used_fails_alone() -> None:
    wrong = SamplingParams(temperature=0.0, logit_bias={1000: 1.0})  # outside the vocabulary
    result = sample(torch.zeros(2, 50), GREEDY, wrong)
    assert list(result.failures) == [1]
    assert "logit_bias is outside the vocabulary" in result.failures[1]
