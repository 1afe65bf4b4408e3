"""The sampler against the one of single rows, that one against transformers, and both against properties."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
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

from engine.batch import SamplingRows
from engine.sampler import Sampled, Sampler
from engine.sampling_state import SamplingState
from tests.support.row_sampler import Row, RowFailed, process, sample_row, warp
from wire.request import SamplingParams

VOCAB = 97
PROMPT = np.array([3, 5, 5, 90], dtype=np.int32)
EOS = (7, 8)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True, params=["torch", "draw"])
def _drawing(request: pytest.FixtureRequest) -> Iterator[None]:
    """In operators of torch as on a CPU, and with the definition of a GPU's kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampling_block.draws_by_kernel", lambda _: request.param == "draw")
        yield


def some_logits(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row_of(params: SamplingParams, outputs: Sequence[int] = (), choice: int = 0) -> Row:
    return Row(params, PROMPT.tolist(), EOS, choice, outputs)


def sample(logits: torch.Tensor, *rows: Row, sampler: Sampler | None = None) -> Sampled:
    """What a sampler says of a batch of these rows."""
    states = [SamplingState(r.params, PROMPT, r.eos, r.choice, list(r.outputs)) for r in rows]
    return sample_states(sampler or Sampler(logits.shape[1], CPU), logits, states)


def sample_states(sampler: Sampler, logits: torch.Tensor, states: Sequence[SamplingState]) -> Sampled:
    positions = np.array([len(state.outputs) for state in states], dtype=np.int64)
    rows = SamplingRows(tuple(states), positions)
    sampled = sampler.sample(logits, rows, torch.from_numpy(positions)).wait()
    for state, token in zip(states, sampled.tokens.tolist(), strict=True):
        state.outputs.append(token)
    return sampled


def ours(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The scores drawn from, as transformers writes them: -inf for what was dropped; the best is 0."""
    ids, scores = warp(process(logits, row), row.params)
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
        got = ours(logits, row_of(params, outputs))
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
    assert torch.equal(ours(logits, row_of(params)), theirs(logits, params, ()))


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
        process(logits, row_of(params, outputs)).numpy(), expected, rtol=1e-6, atol=1e-6
    )


token_ids = st.integers(0, VOCAB - 1)


@st.composite
def some_params(draw: st.DrawFn) -> SamplingParams:
    """Any parameters that a router lets pass and that leave a token, with ids of a vocabulary of VOCAB."""
    allowed = draw(st.sampled_from([(), (), (), tuple(range(0, VOCAB, 3)), (5,), (90, 5, 3)]))
    ends = st.sampled_from([token for token in range(VOCAB) if token != 5])  # or min_tokens masks (5,)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-7, 0.3, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 40, VOCAB, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.3])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4)
        ),
        min_tokens=draw(st.sampled_from([0, 0, 2, 4])),
        stop_token_ids=tuple(draw(st.lists(ends, max_size=3))),
        ignore_eos=draw(st.booleans()),
        allowed_token_ids=allowed,
        top_logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
    )


some_rows = st.builds(
    row_of,
    some_params(),
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
    st.integers(0, 3),
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(some_rows, min_size=1, max_size=9), seed=st.integers(0, 10_000), steps=st.integers(1, 4),
    most_rows=st.sampled_from([1, 2, 1000]),
)  # fmt: skip
def test_every_row_is_sampled_as_if_it_were_alone(
    rows: list[Row], seed: int, steps: int, most_rows: int
) -> None:
    """Several steps, because counts are changed in place and the batch is the same; blocks of any size."""
    sampler = Sampler(VOCAB, CPU)
    sampler._most_rows = most_rows
    states = [SamplingState(r.params, PROMPT, r.eos, r.choice, list(r.outputs)) for r in rows]
    for step in range(steps):
        logits = torch.stack([some_logits(seed + 100 * step + i) for i in range(len(rows))])
        expected = [
            sample_row(logits[i], replace(row, outputs=states[i].outputs)) for i, row in enumerate(rows)
        ]
        sampled = sample_states(sampler, logits, states)
        assert sampled.failures == {}
        assert sampled.tokens.tolist() == [token for token, _ in expected]
        assert sampled.logprobs == [logprobs for _, logprobs in expected]


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(some_rows, min_size=2, max_size=6), seed=st.integers(0, 10_000), data=st.data())
def test_rows_that_come_and_go_keep_their_counts(rows: list[Row], seed: int, data: st.DataObject) -> None:
    """In every step some of the rows are sampled, in some order; some of them are sampled again."""
    sampler = Sampler(VOCAB, CPU)
    states = [SamplingState(r.params, PROMPT, r.eos, r.choice, list(r.outputs)) for r in rows]
    for step in range(5):
        chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
        if data.draw(st.booleans()):
            del states[chosen[0]].outputs[-1:]  # its last position is sampled once more
        logits = torch.stack([some_logits(seed + 100 * step + i) for i in chosen])
        expected = [
            sample_row(logits[k], replace(rows[i], outputs=states[i].outputs))[0]
            for k, i in enumerate(chosen)
        ]
        assert sample_states(sampler, logits, [states[i] for i in chosen]).tokens.tolist() == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 900}]
)
def test_a_large_vocabulary(params: dict[str, float], temperature: float) -> None:
    vocab = 50_000
    rows = [row_of(SamplingParams(temperature=temperature, seed=i, **params)) for i in range(6)]  # type: ignore[arg-type]
    logits = torch.stack([some_logits(i, vocab) for i in range(6)])
    assert sample(logits, *rows).tokens.tolist() == [
        sample_row(logits[i], row)[0] for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.7, seed=3), SamplingParams(top_k=7, seed=3)])
def test_ties_at_a_border_are_broken_alike(params: SamplingParams) -> None:
    """Logits of a few values: many tokens tie, as in bfloat16."""
    for seed in range(60):
        logits = some_logits(seed, scale=1.0).round()
        row = row_of(msgspec.structs.replace(params, seed=seed))
        assert sample(logits[None], row).tokens[0] == sample_row(logits, row)[0]


def test_a_sequence_is_not_penalised_for_what_its_predecessor_said() -> None:
    """It takes the slot of one that has left the batch."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 20], logits[0, 21] = 2.0, 1.9, 1.8
    sampler = Sampler(VOCAB, CPU)
    chosen = [
        sample_states(sampler, logits, [SamplingState(params, np.array(prompt), EOS, 0, [])]).tokens.tolist()
        for prompt in ([5], [6])
    ]
    assert chosen == [[20], [5]]


def test_what_is_kept_on_a_gpu_is_what_is_kept_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There no token is left out of the tensors, because their shapes must not depend on the data."""
    params = [SamplingParams(top_p=0.9, top_k=k, min_p=m, seed=k) for k in (0, 5, 30) for m in (0.0, 0.02)]
    logits = torch.stack([some_logits(i) for i in range(len(params))])
    expected = sample(logits, *map(row_of, params)).tokens.tolist()
    monkeypatch.setattr(
        "engine.truncation._without",
        lambda dropped, ids, scores: (ids, scores.masked_fill_(dropped, -math.inf)),
    )
    assert sample(logits, *map(row_of, params)).tokens.tolist() == expected


def test_min_tokens_suppresses_stop_ids_and_eos_unless_eos_is_ignored() -> None:
    logits = torch.linspace(1.0, 0.0, VOCAB)
    logits[[7, 8, 11]] = torch.tensor([4.0, 3.0, 2.0])
    greedy = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(11,))
    ignoring = msgspec.structs.replace(greedy, ignore_eos=True)
    rows = [row_of(greedy, (1,)), row_of(greedy, (1, 2)), row_of(ignoring, (1,)), row_of(ignoring, (1, 2))]
    assert sample(logits.repeat(4, 1), *rows).tokens.tolist() == [0, 7, 7, 7]
    ended = torch.linspace(1.0, 0.0, VOCAB)
    ended[11] = 2.0
    assert sample(ended.repeat(4, 1), *rows).tokens.tolist() == [0, 11, 0, 11]


def test_temperature_0_takes_the_best_after_penalties() -> None:
    logits = torch.zeros(VOCAB)
    logits[5], logits[6] = 2.0, 1.9
    rows = [
        row_of(SamplingParams(temperature=0.0)),
        row_of(SamplingParams(temperature=0.0, repetition_penalty=1.2)),
        row_of(SamplingParams(temperature=0.0, logit_bias={5: -1.0})),
    ]
    assert sample(logits.repeat(3, 1), *rows).tokens.tolist() == [5, 6, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reported_log_probabilities_are_those_before_any_step(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, logit_bias={5: 50.0}, repetition_penalty=1.3, frequency_penalty=0.5,
        min_tokens=4, top_logprobs=3,
    )  # fmt: skip
    logits = some_logits(2)
    expected = logits.log_softmax(-1)
    sampled = sample(logits[None], row_of(params, (7, 41)))
    (logprobs,) = sampled.logprobs
    assert logprobs is not None
    assert sampled.tokens[0] == 5
    assert logprobs.logprob == float(expected[5])
    values, ids = expected.topk(3)
    assert logprobs.top == list(zip(ids.tolist(), values.tolist(), strict=True))


def test_log_probabilities_of_named_tokens_stand_behind_the_best() -> None:
    asked = [(2, (9, 3, 9)), (0, (VOCAB - 1,)), (3, ()), (None, ()), (0, ())]
    rows = [
        row_of(
            SamplingParams(temperature=0.0, logit_bias={9: -5.0}, top_logprobs=best, logprob_token_ids=named)
        )
        for best, named in asked
    ]
    logits = torch.stack([some_logits(seed) for seed in range(len(rows))])
    for told, (best, named), expected in zip(
        sample(logits, *rows).logprobs, asked, logits.log_softmax(-1), strict=True
    ):
        if best is None:
            assert told is None
            continue
        assert told is not None
        values, ids = expected.topk(best)
        of_best = list(zip(ids.tolist(), values.tolist(), strict=True))
        assert told.top == of_best + [(one, float(expected[one])) for one in named]


def test_a_named_token_outside_the_vocabulary_fails_its_row_alone() -> None:
    wrong = row_of(SamplingParams(top_logprobs=0, logprob_token_ids=(5, VOCAB)))
    fine = row_of(SamplingParams(temperature=0.0, top_logprobs=0, logprob_token_ids=(5,)))
    logits = torch.stack([some_logits(0), some_logits(1)])
    sampled = sample(logits, wrong, fine)
    assert sampled.failures == {0: "logprob_token_ids is outside the vocabulary"}
    assert sampled.logprobs[1] is not None
    assert sampled.logprobs[1].top == [(5, float(logits[1].log_softmax(-1)[5]))]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**63),
    choice=st.integers(0, 8),
    position=st.integers(0, 5),
    neighbours=st.integers(0, 5),
)
def test_a_token_does_not_depend_on_the_batch(seed: int, choice: int, position: int, neighbours: int) -> None:
    row = row_of(SamplingParams(seed=seed, top_p=0.95), range(20, 20 + position), choice)
    logits = some_logits(seed % 1000)
    alone = sample(logits[None], row).tokens[0]
    others = [row_of(SamplingParams(seed=i)) for i in range(neighbours)]
    packed = torch.stack([*(some_logits(i) for i in range(neighbours)), logits])
    assert sample(packed, *others, row).tokens[-1] == alone


def test_choices_seeds_and_positions_draw_differently() -> None:
    rows = [
        row_of(SamplingParams(seed=seed), (1,) * position, choice)
        for seed in range(4) for choice in range(4) for position in range(4)
    ]  # fmt: skip
    drawn = set(sample(torch.zeros(64, 5000), *rows).tokens.tolist())
    assert len(drawn) > 58  # 64 draws of 5000: more than a few collisions would be correlation


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 10 tokens; 6000 draws at successive positions of ten choices of one request."""
    logits = torch.linspace(-1, 1.5, 10)
    states = [SamplingState(SamplingParams(seed=12), PROMPT, (), choice) for choice in range(10)]
    sampler = Sampler(10, CPU)
    for _ in range(600):
        sample_states(sampler, logits.expand(10, 10), states)
    expected = logits.double().softmax(-1).numpy() * 6000
    counts = np.bincount([token for state in states for token in state.outputs], minlength=10)
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # 0.999 quantile, 9 degrees of freedom


def test_logprobs_only_where_asked_for() -> None:
    asked, silent = SamplingParams(temperature=0.0, top_logprobs=0), SamplingParams(temperature=0.0)
    first, second = sample(
        torch.stack([some_logits(0), some_logits(1)]), row_of(asked), row_of(silent)
    ).logprobs
    assert first is not None
    assert first.top == []
    assert second is None


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = some_logits(5).bfloat16()
    row = row_of(SamplingParams(seed=9, top_p=0.9))
    assert sample(logits[None], row).tokens == sample(logits.float()[None], row).tokens


def test_outputs_that_are_sampled_again_are_not_penalised() -> None:
    logits = torch.zeros(VOCAB)
    logits[7], logits[41] = 3.0, 2.5
    state = SamplingState(SamplingParams(temperature=0.0, frequency_penalty=1.0), PROMPT, ())
    sampler = Sampler(VOCAB, CPU)
    assert [int(sample_states(sampler, logits[None], [state]).tokens[0]) for _ in range(3)] == [7, 41, 7]
    del state.outputs[1:]
    assert [int(sample_states(sampler, logits[None], [state]).tokens[0]) for _ in range(2)] == [41, 7]


@pytest.mark.parametrize("place", ["token_counts.TokenCounts._take_slot", "sampler.SamplingBlock"])
def test_a_device_that_was_out_of_memory_samples_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of that step fail; those that come after it, and those that were not in it, do not."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    def states_of(count: int) -> list[SamplingState]:
        return [SamplingState(params, PROMPT, (), choice) for choice in range(count)]

    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 41]] = torch.tensor([3.0, 2.5])
    sampler, kept = Sampler(VOCAB, CPU), states_of(1)
    assert sample_states(sampler, logits, kept).tokens.tolist() == [7]
    others = states_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(f"engine.{place}", no_memory)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                sample_states(sampler, logits.expand(2, -1), others)
    assert sample_states(sampler, logits.expand(2, -1), others).tokens.tolist() == [7, 7]
    assert sample_states(sampler, logits.expand(3, -1), states_of(3)).tokens.tolist() == [7, 7, 7]
    assert sample_states(sampler, logits, kept).tokens.tolist() == [41]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_the_lowest_temperatures_take_the_best_token(temperature: float) -> None:
    logits = some_logits(3)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert sample(logits[None], row_of(params)).tokens[0] == int(logits.argmax())


def test_failures_and_refusals_name_what_the_single_row_says() -> None:
    logits = torch.stack([some_logits(i) for i in range(3)])
    logits[0, 3] = math.nan
    nothing = SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(VOCAB)))
    rows = [row_of(SamplingParams(top_p=0.9)), row_of(nothing), row_of(SamplingParams(top_p=0.9, seed=4))]
    sampled = sample(logits, *rows)
    assert (list(sampled.failures), list(sampled.refusals)) == ([0], [1])
    for i, why in (sampled.failures | sampled.refusals).items():
        with pytest.raises(RowFailed) as failed:
            sample_row(logits[i], rows[i])
        assert why.startswith(str(failed.value))
    assert sampled.tokens[2] == sample_row(logits[2], rows[2])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_sampled(temperature: float) -> None:
    allowed = (4, 70, 11)
    params = SamplingParams(temperature=temperature, allowed_token_ids=allowed, top_k=2, ignore_eos=True)
    logits = torch.stack([some_logits(seed) for seed in range(60)])
    rows = [row_of(msgspec.structs.replace(params, seed=seed)) for seed in range(60)]
    found = set(sample(logits, *rows).tokens.tolist())
    assert found <= set(allowed)
    assert len(found) > 1
    if not temperature:
        best = logits[:, list(allowed)].argmax(-1).tolist()
        assert sample(logits, *rows).tokens.tolist() == [allowed[at] for at in best]


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    none = row_of(SamplingParams(temperature=0.0, allowed_token_ids=(7,), min_tokens=3))  # an end, too early
    fine = row_of(SamplingParams(temperature=0.0))
    sampled = sample(torch.stack([some_logits(1), some_logits(2)]), none, fine)
    assert set(sampled.refusals) == {0}
