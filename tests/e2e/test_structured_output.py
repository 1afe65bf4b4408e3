"""Outputs that follow a grammar, through the whole stack: P and D apart answer as one worker does.

Real processes, a tiny random model in float32: only the grammar makes its output what it must be.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.e2e.test_failures import take, wait_until_busy
from tests.harness.local_stack import Stack, stack
from tests.support.sse import DONE, sse_events

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ant", "bee", "fly"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,9}$"}, "maxItems": 4},
    },
    "required": ["name", "legs", "tags"],
    "additionalProperties": False,
}
LONG = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9999},
    "minItems": 60,
    "maxItems": 60,
}
COMMON: dict[str, Any] = {
    "router": {"prefill_on_decode_tokens": 0},
    "dtype": "float32",
    "threads": 1,
    "page_size": 16,
    "chunked_prefill_size": 32,
    "max_total_tokens": 8192,
}
PATHS: dict[str, dict[str, Any]] = {
    "shm": {"kv_transfer_backend": "shm"},
    "overlap": {"kv_transfer_backend": "tcp", "overlap_depth": 1},
}


@pytest.fixture(scope="module")
def colocated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tiny_model, tmp_path_factory.mktemp("colocated"), prefill=0, decode=1, **COMMON) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module", params=[pytest.param("shm", marks=pytest.mark.invariants), "overlap"])
def split(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    options = {**COMMON, **PATHS[request.param]}
    with stack(tiny_model, tmp_path_factory.mktemp(request.param), prefill=1, decode=1, **options) as running:
        yield running
        running.settle()


def prompt_of(seed: int, tokens: int = 50) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(tokens)]


def asked(running: Stack, number: int, **params: Any) -> Any:
    """The answer of /generate, which must be a good one."""
    sampling = {"temperature": 0.0, "max_new_tokens": 300, **params}
    body = {
        "input_ids": prompt_of(number),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answer = running.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def without_times(answer: Any) -> Any:
    """What must be equal wherever a request is served."""
    if isinstance(answer, list):
        return [without_times(one) for one in answer]
    meta = {key: answer["meta_info"][key] for key in ("finish_reason", "output_token_logprobs")}
    logprobs = [round(logprob, 3) for logprob, *_ in meta.pop("output_token_logprobs")]
    return answer["text"], answer["output_ids"], meta, logprobs


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "legs", "tags"}
        and value["name"] in ("ant", "bee", "fly")
        and 0 <= value["legs"] <= 99
        and all(re.fullmatch("[a-z]{1,9}", tag) for tag in value["tags"])
    )


STRUCTURES: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": ({"json_schema": json.dumps(SCHEMA)}, is_valid),
    "regex": ({"regex": "[a-c]{2,30}x"}, lambda text: re.fullmatch("[a-c]{2,30}x", text)),
    "choice": ({"guided_choice": ["yes", "perhaps", "no"]}, lambda text: text in ("yes", "perhaps", "no")),
    "grammar": (
        {"ebnf": 'root ::= "(" root ")" | [0-9]{1,3}'},
        lambda text: re.fullmatch(r"\(*[0-9]{1,3}\)*", text) and text.count("(") == text.count(")"),
    ),
}
TAG = {
    "type": "triggered_tags", "triggers": ["<i"], "at_least_one": True, "stop_after_first": True,
    "tags": [
        {"begin": "<insect>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</insect>"},
        {"begin": "<id=", "content": {"type": "regex", "pattern": "[0-9]{2,9}"}, "end": "/>"},
    ],
}  # fmt: skip


def is_tag(text: str) -> bool:
    if text.startswith("<insect>"):
        return text.endswith("</insect>") and is_valid(text[len("<insect>") : -len("</insect>")])
    return re.fullmatch("<id=[0-9]{2,9}/>", text) is not None


STRUCTURES["tag"] = ({"structural_tag": {"format": TAG}}, is_tag)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 11, "n": 2},
    "truncated": {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 100, "frequency_penalty": 0.5},
    "ignore_eos": {"ignore_eos": True, "temperature": 0.8, "seed": 2},
}


@pytest.mark.covering
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_prefill_and_decode_apart_answer_as_one_worker(
    colocated: Stack, split: Stack, structure: str, sampling: str
) -> None:
    fields, fits = STRUCTURES[structure]
    for seed in (1, 2):
        params = {**fields, **SAMPLINGS[sampling]}
        answers = [asked(running, seed, **params) for running in (colocated, split)]
        assert without_times(answers[1]) == without_times(answers[0])
        for answer in answers[0] if isinstance(answers[0], list) else [answers[0]]:
            if answer["meta_info"]["finish_reason"]["type"] == "stop":
                assert fits(answer["text"]), answer["text"]
            else:  # brackets or repeats without an end
                assert structure == "grammar"


def test_streams_say_the_same_and_neighbours_without_a_grammar_are_as_alone(split: Stack) -> None:
    """Eight at once, half of them with grammars."""
    bodies: list[dict[str, Any]] = [
        {
            "prompt": prompt_of(20 + i), "max_tokens": 200, "temperature": 0.0,
            **({"guided_json": SCHEMA} if i % 2 else {}),
        }
        for i in range(8)
    ]  # fmt: skip

    def whole(body: dict[str, Any]) -> tuple[str, str]:
        choice = split.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
        return choice["text"], choice["finish_reason"]

    def streamed(body: dict[str, Any]) -> tuple[str, str]:
        answer = split.http.post("/v1/completions", json={**body, "stream": True}).raise_for_status()
        events = [event for event in sse_events(answer.text.splitlines()) if event.data != DONE]
        choices = [event.json["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    alone = [whole(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(streamed, bodies))
    assert together == alone
    for (text, finish), body in zip(alone, bodies, strict=True):
        if "guided_json" in body:
            assert finish == "stop"
            assert is_valid(text)


class Insect(BaseModel):
    """What the model is asked for, as clients write it."""

    name: Literal["ant", "bee"]
    legs: Annotated[int, Field(ge=0, le=99)]
    size: Literal["small", "large"] | None
    friends: Annotated[list[Insect], Field(max_length=1)]


def test_openais_client_parses_what_it_asked_for(split: Stack) -> None:
    with OpenAI(base_url=f"{split.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(4):
            answer = client.chat.completions.parse(
                model="m",
                messages=[{"role": "user", "content": "Name an insect."}],
                response_format=Insect,
                max_tokens=400,
                seed=seed,
            )
            assert answer.choices[0].finish_reason == "stop"
            assert isinstance(answer.choices[0].message.parsed, Insect)


def test_a_required_call_is_what_its_tool_takes(split: Stack, colocated: Stack) -> None:
    parameters = {key: SCHEMA[key] for key in ("type", "properties", "required", "additionalProperties")}
    tools: list[Any] = [{"type": "function", "function": {"name": "add_insect", "parameters": parameters}}]
    body = {
        "messages": [{"role": "user", "content": "Add an insect."}],
        "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400,
    }  # fmt: skip
    for seed in range(2):
        choices = [
            running.http.post("/v1/chat/completions", json={**body, "seed": seed}).json()["choices"][0]
            for running in (split, colocated)
        ]
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
        first, second = (choice["message"]["tool_calls"] for choice in choices)
        assert [call["function"] for call in first] == [call["function"] for call in second]
        (call,) = first
        assert call["function"]["name"] == "add_insect"
        assert json.loads(call["function"]["arguments"])["name"] in ("ant", "bee", "fly")


def test_a_row_that_may_sample_nothing_ends_by_name(split: Stack) -> None:
    """The only way on is a token that min_tokens forbids."""
    params = {"regex": "ab", "stop_token_ids": [b"b"[0] - ord("!")], "min_tokens": 5, "max_new_tokens": 9}
    answer = split.http.post("/generate", json={"text": "x", "sampling_params": params})
    assert answer.status_code == 400, answer.text
    assert "the grammar allows none" in answer.json()["error"]["message"]


def streams(running: Stack, bodies: list[dict[str, Any]], pool: ThreadPoolExecutor) -> list[Any]:
    def one(body: dict[str, Any]) -> str:
        text = ""
        with httpx.Client(base_url=running.url, timeout=100.0) as http:
            answer = http.post("/v1/completions", json={**body, "stream": True}).raise_for_status()
            for event in sse_events(answer.text.splitlines()):
                if event.data != DONE:
                    text += event.json["choices"][0]["text"]
        return text

    return [pool.submit(one, body) for body in bodies]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="restarted", marks=pytest.mark.invariants),
        pytest.param(signal.SIGTERM, id="moved"),
    ],
)
def test_an_output_goes_on_elsewhere_where_its_grammar_was(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Killed: forced tokens. Asked to leave: the room moves with what was sampled meanwhile."""
    bodies = [
        {
            "model": "m",
            "prompt": prompt_of(40 + i),
            "max_tokens": 1000,
            "temperature": 0.0,
            "guided_json": LONG,
        }
        for i in range(6)
    ]
    options = {**COMMON, "overlap_depth": 1, "max_total_tokens": 16384}
    with (
        stack(tiny_model, tmp_path, prefill=1, decode=2, **options) as running,
        ThreadPoolExecutor(6) as pool,
    ):
        undisturbed = [future.result(100.0) for future in streams(running, bodies, pool)]
        futures = streams(running, bodies, pool)
        gone = take(running.decode, wait_until_busy(running))
        gone.process.send_signal(number)
        gone.process.wait(60)
        gone.end()
        assert [future.result(100.0) for future in futures] == undisturbed
        assert all(len(json.loads(text)) == 60 for text in undisturbed)
        metrics = running.admin.get("/metrics").text
        told = "restarts_total" if number is signal.SIGKILL else 'moves_total{state="done"}'
        assert not re.search(re.escape(f"baton_router_{told}") + r" 0\.0", metrics)
        running.settle()
