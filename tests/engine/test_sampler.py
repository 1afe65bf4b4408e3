"""The sampler against transformers' own processors, step by step, and against its properties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.batch import SamplingRow
from engine.sampler import process, sample, sample_row, warp
from engine.sampling_state import SamplingState
from wire.request import SamplingParams

VOCAB = 97
PROMPT = np.array([3, 5, 5, 90], dtype=np.int32)
EOS = (7, 8)


def some_logits(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def state_of(params: SamplingParams, outputs: tuple[int, ...] = (), choice: int = 0) -> SamplingState:
    return SamplingState(params, PROMPT, EOS, choice, outputs)


def ours(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """The scores drawn from, as transformers writes them: -inf for what was dropped; the best is 0."""
    ids, scores = warp(process(logits, state), state.params)
    full = torch.full_like(logits, -math.inf)
    full[ids] = scores
    return full


def theirs(logits: torch.Tensor, params: SamplingParams, outputs: tuple[int, ...]) -> torch.Tensor:
    """transformers' processors in the order in which its generate applies them."""
    steps: list[Any] = []
    if params.logit_bias:
        steps.append(
            SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})
        )
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        eos = torch.tensor([*EOS, *params.stop_token_ids])
        steps.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, eos))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    ids = torch.tensor([[*PROMPT.tolist(), *outputs]])
    scores: torch.Tensor = LogitsProcessorList(steps)(ids, logits[None].clone())
    return scores[0] - scores[0].max()


ALL = SamplingParams(
    temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, min_tokens=5,
    stop_token_ids=(11,), logit_bias={1: 4.0, 90: -3.5},
)  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=1),
        SamplingParams(top_k=13),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(min_tokens=4, stop_token_ids=(11, 12)),
        SamplingParams(min_tokens=3),
        SamplingParams(logit_bias={0: 100.0, 96: -100.0}),
        ALL,
    ],
    ids=str,
)
@pytest.mark.parametrize("outputs", [(), (7, 5, 41)], ids=["first", "later"])
def test_scores_equal_transformers(params: SamplingParams, outputs: tuple[int, ...]) -> None:
    for seed in range(20):
        logits = some_logits(seed)
        expected = theirs(logits, params, outputs)
        got = ours(logits, state_of(params, outputs))
        assert torch.equal(got.isinf(), expected.isinf())
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95, 0.99])
def test_top_p_sums_the_tail_of_a_large_vocabulary_exactly(top_p: float) -> None:
    """Against float64: transformers' own float32 sum over 50,000 tokens misplaces the border by a few."""
    logits = some_logits(4, vocab=50_000)
    ordered, order = logits.double().softmax(-1).sort()
    below = ordered.cumsum(-1)
    kept = set(warp(logits, SamplingParams(top_p=top_p))[0].tolist())
    assert kept >= set(order[below > 1 - top_p + 1e-7].tolist())
    assert kept <= set(order[below > 1 - top_p - 1e-7].tolist())


def test_top_k_keeps_ties_as_transformers_does() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    params = SamplingParams(top_k=2)
    assert torch.equal(ours(logits, state_of(params)), theirs(logits, params, ()))


def test_top_p_of_a_uniform_distribution_keeps_one() -> None:
    ids, _ = warp(torch.zeros(64), SamplingParams(top_p=0.0))
    assert len(ids) == 1


def test_presence_and_frequency_penalties_look_at_outputs_only() -> None:
    """mu[j] -= count[j] * frequency + (count[j] > 0) * presence, in float64, as OpenAI defines it."""
    outputs = (7, 7, 7, 41)
    params = SamplingParams(frequency_penalty=0.4, presence_penalty=-0.3)
    logits = some_logits(1)
    expected = logits.double().numpy().copy()
    counts = np.bincount(outputs, minlength=VOCAB)
    expected -= counts * 0.4 + (counts > 0) * -0.3
    np.testing.assert_allclose(
        process(logits, state_of(params, outputs)).numpy(), expected, rtol=1e-6, atol=1e-6
    )


def test_min_tokens_suppresses_stop_ids_and_eos_unless_eos_is_ignored() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(11,))
    assert state_of(params, (1,)).suppressed == (7, 8, 11)
    assert state_of(params, (1, 2)).suppressed == ()
    ignoring = SamplingParams(min_tokens=2, stop_token_ids=(11,), ignore_eos=True)
    assert state_of(ignoring).suppressed == (11,)


def test_min_tokens_is_kept_by_greedy_requests() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS[0]], logits[5] = 2.0, 1.0
    state = state_of(SamplingParams(temperature=0.0, min_tokens=1))
    assert [int(sample(logits[None], [SamplingRow(state, i)]).tokens[0]) for i in range(2)] == [5, EOS[0]]


def test_temperature_0_takes_the_best_after_penalties() -> None:
    logits = torch.zeros(VOCAB)
    logits[5], logits[6] = 2.0, 1.9
    greedy = SamplingParams(temperature=0.0)
    assert sample_row(logits, state_of(greedy)) == 5
    assert sample_row(logits, state_of(SamplingParams(temperature=0.0, repetition_penalty=1.2))) == 6
    assert sample_row(logits, state_of(SamplingParams(temperature=0.0, logit_bias={5: -1.0}))) == 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reported_log_probabilities_are_those_before_any_step(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, logit_bias={5: 50.0}, repetition_penalty=1.3, frequency_penalty=0.5,
        min_tokens=4, top_logprobs=3,
    )  # fmt: skip
    logits = some_logits(2)
    expected = logits.log_softmax(-1)
    sampled = sample(logits[None], [SamplingRow(state_of(params, (7, 41)), 2)])
    (logprobs,) = sampled.logprobs
    assert logprobs is not None
    assert sampled.tokens[0] == 5
    assert logprobs.logprob == float(expected[5])
    values, ids = expected.topk(3)
    assert logprobs.top == list(zip(ids.tolist(), values.tolist(), strict=True))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    choice=st.integers(0, 8),
    position=st.integers(0, 5),
    neighbours=st.integers(0, 5),
)
def test_a_token_does_not_depend_on_the_batch(seed: int, choice: int, position: int, neighbours: int) -> None:
    params = SamplingParams(seed=seed, top_p=0.95)
    outputs = tuple(range(20, 20 + position))
    logits = some_logits(seed % 1000)
    alone = sample(logits[None], [SamplingRow(state_of(params, outputs, choice), position)]).tokens[0]
    others = [SamplingRow(state_of(SamplingParams(seed=i)), 0) for i in range(neighbours)]
    rows = [*others, SamplingRow(state_of(params, outputs, choice), position)]
    packed = torch.stack([*(some_logits(i) for i in range(neighbours)), logits])
    assert sample(packed, rows).tokens[-1] == alone


def test_choices_seeds_and_positions_draw_differently() -> None:
    flat = torch.zeros(5000)
    drawn = {
        sample_row(flat, state_of(SamplingParams(seed=seed), outputs=(1,) * position, choice=choice))
        for seed in range(4) for choice in range(4) for position in range(4)
    }  # fmt: skip
    assert len(drawn) > 58  # 64 draws of 5000: more than a few collisions would be correlation


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 10 tokens; 6000 draws at successive positions of one request."""
    logits = torch.linspace(-1, 1.5, 10)
    state = state_of(SamplingParams(seed=12))
    counts = np.zeros(10)
    for position in range(6000):
        result = sample(logits[None], [SamplingRow(state, position)])
        counts[result.tokens[0]] += 1
    expected = logits.double().softmax(-1).numpy() * 6000
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # 0.999 quantile, 9 degrees of freedom


def test_logprobs_are_of_the_model_not_of_what_was_sampled_from() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, top_logprobs=3, logit_bias={50: 100.0})
    logits = some_logits(3)
    result = sample(logits[None], [SamplingRow(state_of(params), 0)])
    reported = result.logprobs[0]
    expected = logits.double().log_softmax(-1)
    best = expected.topk(3)
    assert result.tokens[0] == 50
    assert reported is not None
    assert reported.logprob == pytest.approx(float(expected[50]), abs=1e-5)
    assert [token for token, _ in reported.top] == best.indices.tolist()
    assert [value for _, value in reported.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_only_where_asked_for() -> None:
    asked, silent = SamplingParams(temperature=0.0, top_logprobs=0), SamplingParams(temperature=0.0)
    rows = [SamplingRow(state_of(asked), 0), SamplingRow(state_of(silent), 0)]
    first, second = sample(torch.stack([some_logits(0), some_logits(1)]), rows).logprobs
    assert first is not None
    assert first.top == []
    assert second is None


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = some_logits(5).bfloat16()
    params = SamplingParams(seed=9, top_p=0.9)
    low = sample(logits[None], [SamplingRow(state_of(params), 0)]).tokens
    high = sample(logits.float()[None], [SamplingRow(state_of(params), 0)]).tokens
    assert low == high


def test_a_position_sampled_again_is_counted_once() -> None:
    state = state_of(SamplingParams(temperature=0.0, frequency_penalty=1.0))
    logits = some_logits(2)[None]
    for position in (0, 1, 2, 1, 2):
        sample(logits, [SamplingRow(state, position)])
    assert len(state.outputs) == 3
    assert sum(state.output_counts.values()) == 3
    assert set(state.output_counts) == set(state.outputs)


def test_outputs_that_are_sampled_again_are_not_penalised() -> None:
    params = SamplingParams(presence_penalty=1.5)
    state = state_of(params, (7, 41))
    state.rewind(1)
    logits = some_logits(2)
    assert torch.equal(process(logits, state), process(logits, state_of(params, (7,))))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_the_lowest_temperatures_take_the_best_token(temperature: float) -> None:
    logits = some_logits(3)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert sample_row(logits, state_of(params)) == int(logits.argmax())
