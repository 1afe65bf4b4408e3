"""How an answer ends, and how it is counted, through prefill and decode: stops, limits, usage, the client.

Real processes, a tiny model in float32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.asking import ask, timeline
from tests.harness.local_stack import Stack, stack
from tests.support.sse import DONE, sse_events
from tests.support.tiny_configs import VOCAB_SIZE

EOS = 258
PAIRS = range(259, VOCAB_SIZE)  # every one of these tokens is two letters
PROMPT = random.Random(8).choices(range(256), k=40)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def split(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A prefill and a decode worker."""
    with stack(
        tiny_model,
        tmp_path_factory.mktemp("endings"),
        router={"prefill_on_decode_tokens": 0},
        dtype="float32",
        threads=1,
        max_total_tokens=4096,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(split: Stack) -> list[int]:
    """The answer when nothing ends it early."""
    return list(ask(split, PROMPT, GREEDY)["output_ids"])


# -- stop strings ------------------------------------------------------------------------------------


def completion(running: Stack, **fields: Any) -> dict[str, Any]:
    """A greedy completion of letter pairs, so that its text says where every token begins."""
    body = {
        "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 1000,
        "logit_bias": dict.fromkeys(map(str, PAIRS), 100), **fields,
    }  # fmt: skip
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return dict(answer.json())
    *chunks, last, done = sse_events(answer.text.split("\n"))
    assert done.data == DONE
    *_, final = choices = [chunk.json["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    text = "".join(choice["text"] for choice in choices)
    return {
        "choices": [{"text": text, "finish_reason": final["finish_reason"]}],
        "usage": last.json["usage"],
    }


def split_stop(text: str) -> tuple[str, int]:
    """A string over the borders of three tokens, and the number of its first token."""
    for first in range(3, len(text) // 2 - 3):
        stop = text[2 * first + 1 : 2 * first + 5]
        if text.find(stop) == 2 * first + 1:
            return stop, first
    raise AssertionError(f"{text!r} repeats itself too much")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_is_split_over_tokens(split: Stack, stream: bool) -> None:
    text = completion(split, max_tokens=24)["choices"][0]["text"]
    assert len(text) == 48
    stop, first = split_stop(text)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = completion(split, stop=["never there", stop], **options)
    assert answer["choices"][0]["text"] == text[: 2 * first + 1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == first + 3
    split.settle()


def test_a_stop_string_in_token_0_ends_the_hand_off_while_it_runs(split: Stack) -> None:
    text = completion(split, max_tokens=4)["choices"][0]["text"]
    answer = completion(split, stop=text[:2])
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    split.settle()


def test_text_that_only_begins_like_a_stop_string_is_shown(split: Stack) -> None:
    text = completion(split, max_tokens=12)["choices"][0]["text"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = completion(split, max_tokens=12, stop=[text[-3:] + "!"], **options)
    assert answer["choices"][0] == {"text": text, "finish_reason": "length"}
    split.settle()


# -- tokens that end, and limits -----------------------------------------------------------------------


def test_stop_token_ids(split: Stack, greedy: list[int]) -> None:
    end = greedy[9]
    answer = ask(split, PROMPT, {**GREEDY, "stop_token_ids": [end]})
    assert answer["output_ids"] == greedy[: greedy.index(end) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    split.settle()


def test_min_tokens_holds_stop_tokens_back(split: Stack, greedy: list[int]) -> None:
    answer = ask(split, PROMPT, {**GREEDY, "stop_token_ids": [greedy[0]], "min_new_tokens": 5})
    assert len(answer["output_ids"]) >= 5
    assert greedy[0] not in answer["output_ids"][:5]
    always_eos = {**GREEDY, "ignore_eos": False, "logit_bias": {str(EOS): 100.0}, "min_new_tokens": 5}
    answer = ask(split, PROMPT, always_eos)
    assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1 == 5
    split.settle()


def test_ignore_eos(split: Stack) -> None:
    answer = ask(split, PROMPT, {**GREEDY, "logit_bias": {str(EOS): 100.0}})
    assert answer["output_ids"] == [EOS] * 24
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 24}
    split.settle()


@pytest.mark.parametrize("how", ["max_new_tokens", "eos", "stop_token_ids"])
def test_token_0_ends_the_request_on_prefill_and_decode_lets_go(
    split: Stack, greedy: list[int], how: str
) -> None:
    sampling, token, finish = {
        "max_new_tokens": ({**GREEDY, "max_new_tokens": 1}, greedy[0], "length"),
        "eos": ({**GREEDY, "ignore_eos": False, "logit_bias": {str(EOS): 100.0}}, EOS, "stop"),
        "stop_token_ids": ({**GREEDY, "stop_token_ids": [greedy[0]]}, greedy[0], "stop"),
    }[how]
    for attempt in range(3):  # on a busy machine prefill's end may come to decode before the router's request
        answer = ask(split, PROMPT, sampling, {"X-Request-Id": f"{how}-{attempt}"})
        assert answer["output_ids"] == [token]
        assert answer["meta_info"]["finish_reason"]["type"] == finish
        split.settle()
        with suppress(AssertionError):
            seen = timeline(split, f"{how}-{attempt}", lanes=3)
            break
    else:
        pytest.fail("decode had no part in any of the rooms")
    decode = [stage for stage, _ in seen["stages"][split.decode[0].ready["id"]]]
    assert decode in (["decode_bootstrap"], ["decode_bootstrap", "decode_waiting"])
    assert seen["about"]["kv_bytes"] == 0


# -- usage and the official client -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(split: Stack) -> Iterator[OpenAI]:
    url = f"{split.router.ready['http']}/v1"
    with OpenAI(base_url=url, api_key="none", timeout=60.0, max_retries=0) as client:
        yield client


def test_the_openai_client_streams_and_does_not(split: Stack, client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "The first sixteen tokens and then some more."}]
    fields: dict[str, Any] = {
        "model": "m", "messages": messages, "max_tokens": 20, "seed": 7, "temperature": 0.8,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    rendered = split.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (rendered, 20)
    assert whole.usage.total_tokens == rendered + 20
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    with client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (rendered, 20)
    # a repeat computes its last page at most, and whatever the page border leaves
    assert rendered - 16 <= last.usage.prompt_tokens_details.cached_tokens < rendered
    split.settle()


def test_a_stream_without_usage_has_none(split: Stack, client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with client.chat.completions.create(model="m", messages=messages, max_tokens=4, stream=True) as stream:
        chunks = list(stream)
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    split.settle()
