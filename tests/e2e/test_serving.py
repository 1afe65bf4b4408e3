"""Law number one for everything a client can ask: sampling, choices, log-probabilities, stops, endings.

One colocated worker is the yardstick; prefill and decode apart, over each transport and with overlapped
steps, must answer the same. Real processes, a tiny model in float32.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.asking import ask, one_choice, timeline
from tests.harness.local_stack import Stack, stack
from wire.request import SamplingParams, TokenLogprobs

CHUNK = 32
PAGE_SIZE = 16
PATHS: dict[str, dict[str, Any]] = {
    "shm": {"kv_transfer_backend": "shm"},
    "tcp": {"kv_transfer_backend": "tcp"},
    "mooncake": {"kv_transfer_backend": "mooncake"},
    "overlap": {"kv_transfer_backend": "shm", "overlap_depth": 1},
}
COMMON: dict[str, Any] = {
    "router": {"prefill_on_decode_tokens": 0},
    "dtype": "float32",
    "threads": 1,
    "page_size": PAGE_SIZE,
    "chunked_prefill_size": CHUNK,
    "max_total_tokens": 4096,
}
on_every_path = pytest.mark.parametrize("split", list(PATHS), indirect=True)
on_one_path = pytest.mark.parametrize("split", ["shm"], indirect=True)


@pytest.fixture(scope="module")
def colocated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker that does both halves: the yardstick."""
    with stack(tiny_model, tmp_path_factory.mktemp("colocated"), prefill=0, decode=1, **COMMON) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def split(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A prefill and a decode worker, joined by the path that the test names."""
    options = {**COMMON, **PATHS[request.param]}
    with stack(tiny_model, tmp_path_factory.mktemp(request.param), prefill=1, decode=1, **options) as running:
        yield running


def prompt_of(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(tokens)]


class Question(NamedTuple):
    """A prompt and how to sample its answer."""

    prompt: list[int]
    sampling: dict[str, Any]


SEEDED = Question(
    prompt_of(1, 45),
    {
        "temperature": 0.9, "top_p": 0.95, "top_k": 60, "seed": 1234, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "ignore_eos": True, "max_new_tokens": 48,
    },
)  # fmt: skip
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24}
CROWD = [
    SEEDED,
    Question(prompt_of(1, 45), {**SEEDED.sampling, "seed": 99}),  # only the seed tells it from the first
    Question(prompt_of(2, 5), GREEDY),
    Question(prompt_of(3, 100), {**GREEDY, "repetition_penalty": 1.3}),
    Question(prompt_of(4, 31), {**SEEDED.sampling, "temperature": 1.5, "top_k": 0, "min_p": 0.02}),
    Question(prompt_of(5, 64), {**SEEDED.sampling, "max_new_tokens": 7}),
    Question(prompt_of(1, 32) + prompt_of(6, 9), {**GREEDY, "logit_bias": {"7": 3.0}}),
    Question(prompt_of(7, 77), {**SEEDED.sampling, "top_p": 0.5, "seed": 5}),
]


def tokens_of(running: Stack, question: Question) -> list[int]:
    return list(ask(running, *question)["output_ids"])


def crowd(running: Stack) -> list[list[int]]:
    with ThreadPoolExecutor(len(CROWD)) as pool:
        return list(pool.map(lambda question: tokens_of(running, question), CROWD))


@pytest.fixture(scope="module")
def alone(colocated: Stack) -> list[list[int]]:
    """What each of the crowd is answered when it is alone on one worker."""
    return [tokens_of(colocated, question) for question in CROWD]


def test_requests_are_answered_in_a_batch_as_alone(colocated: Stack, alone: list[list[int]]) -> None:
    assert alone[0] != alone[1]
    assert len(set(alone[0])) > 16
    assert crowd(colocated) == alone
    colocated.settle()


@on_every_path
def test_prefill_apart_changes_no_sampled_token(split: Stack, alone: list[list[int]]) -> None:
    assert tokens_of(split, SEEDED) == alone[0]
    assert crowd(split) == alone
    split.settle()


# -- choices and log-probabilities ---------------------------------------------------------------------


class Choice(NamedTuple):
    """One choice: its tokens, their log-probabilities, and the best ones of each step."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[float]]


def choice_of(tokens: list[int], logprobs: list[TokenLogprobs]) -> Choice:
    return Choice(tokens, [lp.logprob for lp in logprobs], [[v for _, v in lp.top] for lp in logprobs])


@pytest.fixture(scope="module")
def three_alone(colocated: Stack) -> list[Choice]:
    """Each of three choices, asked alone of one worker."""
    fields = {**SEEDED.sampling, "top_logprobs": 4}
    sampling = SamplingParams(**fields)
    return [choice_of(*one_choice(colocated, 0, SEEDED.prompt, sampling, k)) for k in range(3)]


@on_every_path
def test_three_choices_with_logprobs(split: Stack, three_alone: list[Choice]) -> None:
    sampling = {**SEEDED.sampling, "n": 3}
    answers = ask(split, SEEDED.prompt, sampling, return_logprob=True, top_logprobs_num=4)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    for answer, expected in zip(answers, three_alone, strict=True):
        assert answer["output_ids"] == expected.tokens
        chosen = answer["meta_info"]["output_token_logprobs"]
        best = answer["meta_info"]["output_top_logprobs"]
        assert [token for _, token, _ in chosen] == expected.tokens
        assert [value for value, *_ in chosen] == pytest.approx(expected.logprobs, abs=1e-4)
        assert len(best) == len(expected.tokens)
        for (logprob, token, _), entries, others in zip(chosen, best, expected.top, strict=True):
            values = [value for value, *_ in entries]
            assert all(map(math.isfinite, [logprob, *values]))
            assert len(values) == 4
            assert values == sorted(values, reverse=True)
            assert values == pytest.approx(others, abs=1e-4)
            named = {other: value for value, other, _ in entries}
            assert named.get(token, logprob) == logprob <= values[0] <= 0.0
    split.settle()


# -- the timeline --------------------------------------------------------------------------------------

ROUTER_STAGES = ["tokenize", "tokenizer_dispatch"]
DECODE_STAGES = ["decode_bootstrap", "decode_waiting", "decode_transferred", "decode_loop"]


@on_every_path
@pytest.mark.parametrize("prompt_tokens", [20, 100])
def test_a_timeline_shows_every_stage_once_and_in_order(
    split: Stack, request: pytest.FixtureRequest, prompt_tokens: int
) -> None:
    prompt = prompt_of(prompt_tokens, prompt_tokens)
    path = request.node.callspec.params["split"]
    name = f"trace-{prompt_tokens}"
    ask(split, prompt, GREEDY, {"X-Request-Id": name})
    seen = timeline(split, name, lanes=3)
    prefill, decode = split.prefill[0].ready["id"], split.decode[0].ready["id"]
    lanes = {lane: [stage for stage, _ in stages] for lane, stages in seen["stages"].items()}
    assert lanes["router"] == ROUTER_STAGES
    assert lanes[decode] == DECODE_STAGES
    chunks = (prompt_tokens - 1) // CHUNK
    shipped = lanes[prefill].index("prefill_transfer_kv_cache")
    assert shipped >= 3  # pages of a chunk may leave while the next one is computed: after the first forward
    forwards = ["prefill_chunked_forward"] * chunks + ["prefill_forward"]
    expected = ["prefill_bootstrap", "prefill_waiting", *forwards]
    assert lanes[prefill][:shipped] + lanes[prefill][shipped + 1 :] == expected
    for stages in seen["stages"].values():
        times = [at for _, at in stages]
        assert times == sorted(set(times))
    at = {stage: ns for stages in seen["stages"].values() for stage, ns in stages}
    assert at["tokenizer_dispatch"] < min(at["prefill_bootstrap"], at["decode_bootstrap"])
    assert max(at["prefill_transfer_kv_cache"], at["prefill_forward"]) < at["decode_transferred"]
    record = next(w for w in split.admin.get("/debug/workers").json()["workers"] if w["id"] == decode)
    pages = -(-prompt_tokens // PAGE_SIZE)
    assert seen["about"]["kv_bytes"] == pages * record["groups"][0]["page_bytes"]
    assert seen["about"]["kv_backend"] == PATHS[path]["kv_transfer_backend"]
    split.settle()
