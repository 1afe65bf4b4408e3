"""What is told of a prompt, log-probabilities of its tokens and its vector, is transformers', through the
whole stack in float32.

However the prompt is cut into chunks, whatever of it is cached, and beside other requests in a batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.local_stack import Stack, stack
from tests.support.reference import reference_model
from tests.support.tiny_models import make_tiny

CLOSE = 2e-4
COMMON: dict[str, Any] = {
    "router": {"prefill_on_decode_tokens": 0},
    "dtype": "float32",
    "threads": 1,
    "page_size": 16,
    "chunked_prefill_size": 32,
    "max_total_tokens": 8192,
}
PATHS: dict[str, dict[str, Any]] = {
    "split": {"prefill": 1, "kv_transfer_backend": "shm"},
    "colocated": {"prefill": 0, "overlap_depth": 1},
}
FAMILIES = {"split": "llama", "colocated": "falcon_h1"}


@pytest.fixture(scope="module", params=list(PATHS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Path]]:
    model = make_tiny(FAMILIES[request.param], tmp_path_factory.mktemp("model"), seed=1)
    options = {**COMMON, **PATHS[request.param]}
    with stack(model, tmp_path_factory.mktemp(request.param), decode=1, **options) as running:
        yield running, model
        running.settle()


def prompt_of(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(tokens)]


@cache
def logprobs_of(model: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """transformers' [tokens, vocab]: of what follows each token."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(model, 0)(torch.tensor([prompt])).logits[0]
    return logits.float().log_softmax(-1)


@cache
def states_of(model: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """transformers' [tokens, hidden]: of the last layer, after its norm."""
    with torch.inference_mode():
        said = reference_model(model, 0)(torch.tensor([prompt]), output_hidden_states=True)
    states: torch.Tensor = said.hidden_states[-1][0]
    return states.float()


def post(running: Stack, path: str, body: dict[str, Any]) -> Any:
    answer = running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_echo(running: Stack, model: Path, prompt: list[int], outputs: int, best: int) -> None:
    """/v1/completions as lm-eval's loglikelihood asks it."""
    body = {
        "prompt": prompt, "max_tokens": outputs, "echo": True, "logprobs": best, "temperature": 0,
        "return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    answer = post(running, "/v1/completions", body)
    (choice,) = answer["choices"]
    told, tokens = choice["logprobs"], prompt + choice["token_ids"]
    assert len(choice["token_ids"]) == outputs == answer["usage"]["completion_tokens"]
    assert told["tokens"] == [f"token_id:{token}" for token in tokens]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    want = logprobs_of(model, tuple(tokens[:-1])).numpy()
    chosen = want[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(told["token_logprobs"][1:], chosen, atol=CLOSE)
    for at, top in enumerate(told["top_logprobs"][1:]):
        assert top.pop(told["tokens"][at + 1]) == told["token_logprobs"][at + 1]
        others = np.delete(want[at], tokens[at + 1])
        assert len(top) in (best - 1, best)
        np.testing.assert_allclose(
            sorted(top.values()), np.sort(others)[len(others) - len(top) :], atol=CLOSE
        )


@pytest.mark.parametrize("tokens", [2, 33, 150])
def test_an_echoed_prompt_has_its_log_probabilities(served: tuple[Stack, Path], tokens: int) -> None:
    running, model = served
    prompt = prompt_of(tokens, tokens)
    for outputs in (0, 1, 5):  # again, with all of it cached
        check_echo(running, model, prompt, outputs, 2)


def test_beside_others_in_a_batch(served: tuple[Stack, Path]) -> None:
    running, model = served
    prompts = [prompt_of(100 + number, 20 + 17 * number) for number in range(6)]

    def other(number: int) -> None:
        sampling = {"max_new_tokens": 60, "ignore_eos": True}
        post(running, "/generate", {"input_ids": prompt_of(number, 40), "sampling_params": sampling})

    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(check_echo, running, model, prompt, 3, 1) for prompt in prompts]
        others = [threads.submit(other, number) for number in range(6)]
        for one in [*asked, *others]:
            one.result()


def test_the_other_forms(served: tuple[Stack, Path]) -> None:
    running, model = served
    prompt = prompt_of(7, 40)
    want = logprobs_of(model, tuple(prompt)).numpy()
    chosen = want[np.arange(39), prompt[1:]]
    body = {"prompt": [prompt, prompt[:1]], "max_tokens": 1, "prompt_logprobs": 1, "n": 2, "temperature": 0}
    choices = post(running, "/v1/completions", body)["choices"]
    for choice in choices[:2]:
        first, *told = choice["prompt_logprobs"]
        assert first is None
        found = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], told, strict=True)]
        np.testing.assert_allclose(found, chosen, atol=CLOSE)
        assert all(any(one["rank"] == 1 for one in entry.values()) for entry in told)
    assert [choice["prompt_logprobs"] for choice in choices[2:]] == [[None], [None]]
    native = {
        "input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "temperature": 0},
        "return_logprob": True, "logprob_start_len": 10, "top_logprobs_num": 1,
    }  # fmt: skip
    meta = post(running, "/generate", native)["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt[10:]
    found = [logprob for logprob, *_ in meta["input_token_logprobs"]]
    np.testing.assert_allclose(found, chosen[9:], atol=CLOSE)
    assert len(meta["input_top_logprobs"]) == 30


def test_named_tokens_have_log_probabilities_at_each_output_token(served: tuple[Stack, Path]) -> None:
    running, model = served
    prompt, named = prompt_of(8, 40), [7, 250, 7, 3]
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    native = {
        "input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2,
        "token_ids_logprob": named,
    }  # fmt: skip
    answer = post(running, "/generate", native)
    meta, outputs = answer["meta_info"], answer["output_ids"]
    want = logprobs_of(model, (*prompt, *outputs[:-1]))[len(prompt) - 1 :]
    for of_named, best, expected in zip(
        meta["output_token_ids_logprobs"], meta["output_top_logprobs"], want, strict=True
    ):
        assert [token for _, token, _ in of_named] == named
        np.testing.assert_allclose([one for one, *_ in of_named], expected[named].numpy(), atol=CLOSE)
        np.testing.assert_allclose([one for one, *_ in best], expected.topk(2).values.numpy(), atol=CLOSE)
    body = {
        "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 2,
        "logprob_token_ids": named, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    (choice,) = post(running, "/v1/completions", body)["choices"]
    for token, top, expected in zip(outputs, choice["logprobs"]["top_logprobs"], want, strict=True):
        assert list(top) == [f"token_id:{one}" for one in dict.fromkeys([*named, token])]
        np.testing.assert_allclose(list(top.values())[:3], expected[[7, 250, 3]].numpy(), atol=CLOSE)
    chat = {
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0,
        "logprobs": True, "logprob_token_ids": named, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "top_logprobs": 5,
    }  # fmt: skip
    told = post(running, "/v1/chat/completions", chat)
    (choice,) = told["choices"]
    tokens = (*told["prompt_token_ids"], *choice["token_ids"])
    want = logprobs_of(model, tokens[:-1])[len(told["prompt_token_ids"]) - 1 :]
    entries = choice["logprobs"]["content"]
    for token, entry, expected in zip(choice["token_ids"], entries, want, strict=True):
        ids = [*dict.fromkeys([*named, token])]
        assert [one["token"] for one in entry["top_logprobs"]] == [f"token_id:{one}" for one in ids]
        found = [one["logprob"] for one in entry["top_logprobs"]]
        np.testing.assert_allclose(found, expected[ids].numpy(), atol=CLOSE)
    streamed = running.http.post("/v1/chat/completions", json={**chat, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    parts = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c.get("logprobs")]
    assert [entry for part in parts for entry in part] == entries


def test_vectors_of_prompts(served: tuple[Stack, Path]) -> None:
    running, model = served
    prompts = [prompt_of(200 + tokens, tokens) for tokens in (1, 2, 33, 64, 150)]
    states = [states_of(model, tuple(prompt)) for prompt in prompts]
    for _ in range(2):  # again, with all of them cached
        for pooling, want in (
            ("last", [one[-1] for one in states]),
            ("mean", [one.mean(0) for one in states]),
        ):
            body = {"input": prompts, "pooling": pooling, "normalize": False}
            told = post(running, "/v1/embeddings", body)["data"]
            for one, vector in zip(told, want, strict=True):
                np.testing.assert_allclose(one["embedding"], vector.numpy(), atol=1e-4)
    first = post(running, "/v1/embeddings", {"input": prompts[4]})["data"][0]["embedding"]
    unit = states[4][-1] / states[4][-1].norm()
    np.testing.assert_allclose(first, unit.numpy(), atol=1e-4)
