"""One request whose logits are not finite, beside others: it gets an error, and they get their tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.harness.local_stack import Stack, stack
from tests.support.reference import draw_model

_random = random.Random(3)
PROMPTS = [[_random.randrange(256) for _ in range(n)] for n in (9, 40, 70, 130)]
LENGTH = 40


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], int]:
    """(model, greedy answers to PROMPTS, a token whose embedding is NaN and which no answer has)."""
    path, answers = draw_model("llama", tmp_path_factory.mktemp("poisoned"), 0, PROMPTS, LENGTH)
    bad = next(token for token in range(260, 320) if all(token not in answer for answer in answers))
    weights = safetensors.torch.load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][bad] = float("nan")
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path, answers, bad


@pytest.fixture(scope="module", params=[0, 1], ids=["depth0", "depth1"])
def running(
    request: pytest.FixtureRequest, drawn: tuple[Path, list[list[int]], int], tmp_path_factory: Any
) -> Iterator[Stack]:
    with stack(
        drawn[0],
        tmp_path_factory.mktemp("stack"),
        router={"prefill_on_decode_tokens": 0},
        dtype="float32",
        chunked_prefill_size=32,
        max_total_tokens=4096,
        max_running_requests=16,
        overlap_depth=request.param,
        threads=1,
    ) as running:
        yield running
        running.settle()


def post(running: Stack, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = running.http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    return answer.status_code, answer.json()


def bad_bodies(bad: int) -> list[dict[str, Any]]:
    """Bad in the first chunk of a prompt, in its last, and in the first decode step."""
    return [
        {"prompt": [1, bad, *PROMPTS[3]], "max_tokens": 8},
        {"prompt": [*PROMPTS[3], bad], "max_tokens": 8},
        {"prompt": PROMPTS[1], "max_tokens": 8, "logit_bias": {str(bad): 100}},
    ]


def test_neighbours_get_their_tokens_and_the_bad_ones_an_error(
    running: Stack, drawn: tuple[Path, list[list[int]], int]
) -> None:
    _, answers, bad = drawn
    with ThreadPoolExecutor(12) as pool:
        good = [pool.submit(running.generate, prompt, LENGTH) for prompt in PROMPTS for _ in range(2)]
        failing = [pool.submit(post, running, body) for body in bad_bodies(bad)]
        outputs = [future.result()["output_ids"] for future in good]
        errors = [future.result() for future in failing]
    assert outputs == [answer for answer in answers for _ in range(2)]
    for status, body in errors:
        assert status == 500, body
        error = body["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert "not finite" in error["message"]
        assert "room " in error["message"]
    # The same prompts without the bad token: nothing of the failed ones was cached.
    again = [running.generate(prompt, LENGTH)["output_ids"] for prompt in PROMPTS]
    assert again == answers


def test_a_stream_that_goes_bad_says_so(running: Stack, drawn: tuple[Path, list[list[int]], int]) -> None:
    *_, bad = drawn
    body = {
        "prompt": PROMPTS[2], "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True,
        "logit_bias": {str(bad): 100},
    }  # fmt: skip
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    assert last["error"]["code"] == "request_failed"
