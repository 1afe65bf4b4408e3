"""What vLLM's and SGLang's own tests refuse, or take, of a request: docs/api-parity.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker
from wire.messages.rooms import Decode
from wire.records import Role

USER = {"role": "user", "content": "Hello there"}
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHATS: {"messages": [USER], "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
WITHOUT_A_CHAT = (COMPLETIONS, "/generate")


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[RouterProcess, FakeWorker]]:
    router = start_router(tmp_path_factory.mktemp("wrong"), model)
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=512, step_s=0.001)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


@pytest.fixture
def router(service: tuple[RouterProcess, FakeWorker]) -> RouterProcess:
    return service[0]


def refused(router: RouterProcess, path: str, **fields: Any) -> dict[str, Any]:
    """OpenAI's error for a body with these fields."""
    answer = router.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def taken(router: RouterProcess, path: str, **fields: Any) -> dict[str, Any]:
    answer = router.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", ["[]", '"text"', "3", "null", "true", '[{"model": "tiny"}]', ""])
def test_a_body_is_an_object(router: RouterProcess, path: str, body: str) -> None:
    answer = router.http.post(path, content=body.encode())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_logit_bias_is_numbers_of_tokens(router: RouterProcess, path: str) -> None:
    for bias in ({"5": 1}, {"5": -100, "6": 100.0}, {}, None):
        taken(router, path, logit_bias=bias)
    for bias in ({"a": 1}, {"1.5": 1}, {"a": 1, "b": 2}, {"5": "x"}, {"5": None}, {"-1": 1}, [5]):
        assert refused(router, path, logit_bias=bias)["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHATS, {"logprobs": "many"}, "logprobs"),
        (CHATS, {"prompt_logprobs": -2}, "prompt_logprobs"),
        (CHATS, {"prompt_logprobs": "many"}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -2}, "logprobs"),
        (COMPLETIONS, {"logprobs": "many"}, "logprobs"),
        (RESPONSES, {"top_logprobs": -1}, "top_logprobs"),
        (CHATS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [1], "echo": True, "max_tokens": 0},
         "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [-1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        (CHATS, {"logprobs": True, "logprob_token_ids": ["a"]}, "logprob_token_ids"),
        (RESPONSES, {"top_logprobs": 1, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)  # fmt: skip
def test_log_probabilities_are_of_a_few_tokens(
    router: RouterProcess, path: str, fields: dict[str, Any], param: str
) -> None:
    assert refused(router, path, **fields)["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_numbers_have_bounds(router: RouterProcess, path: str) -> None:
    for name, wrong in (
        ("n", (0, -1, 129, 2**31, "two")),
        ("seed", (2**63, -(2**63) - 1, 2**100, "x", 1.5)),
        ("max_tokens", (-1, "x")),
        ("min_tokens", (-1, 3)),
        ("stop_token_ids", (["x"], [1.5], [-1])),
        ("thinking_token_budget", (-2, "x")),
        ("top_p", (0, -0.1, 1.1)),
        ("min_p", (-0.1, 1.1)),
        ("top_k", (-2, 1.5)),
        ("frequency_penalty", (-2.1, 2.1)),
    ):
        for value in wrong:
            assert refused(router, path, **{name: value})["param"] == name
    taken(router, path, n=128, max_tokens=1)
    for seed in (0, 2**63 - 1, -(2**63), None):
        taken(router, path, seed=seed)
    taken(router, path, thinking_token_budget=-1)
    taken(router, path, frequency_penalty=-2, presence_penalty=2)


@pytest.mark.parametrize(
    "prompt",
    [[], "", [""], [[]], [-1], [[1, -1]], [[100_000]], ["a", 1], [1, "a"], [1.5], {"text": "a"}, [[["a"]]]],
    ids=str,
)
def test_a_prompt_is_text_or_tokens(router: RouterProcess, prompt: Any) -> None:
    assert refused(router, COMPLETIONS, prompt=prompt)["param"] == "prompt"


def test_a_request_has_so_many_prompts(router: RouterProcess) -> None:
    for prompt in ("a", [1]):
        assert len(taken(router, COMPLETIONS, prompt=[prompt] * 256, max_tokens=1)["choices"]) == 256
        assert "256" in refused(router, COMPLETIONS, prompt=[prompt] * 257)["message"]
        assert refused(router, COMPLETIONS, prompt=[prompt] * 100, n=128)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES, "/generate"])
def test_a_salt_is_a_short_text(router: RouterProcess, path: str) -> None:
    taken(router, path, cache_salt="a salt")
    for salt in (3, {"a": 1}, "x" * 10_000):
        assert refused(router, path, cache_salt=salt)["param"] == "cache_salt"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [False, True])
def test_what_exceeds_the_context_is_refused_before_a_stream_begins(
    router: RouterProcess, path: str, stream: bool
) -> None:
    name = "prompt" if path == COMPLETIONS else "messages"
    long = "x y " * 400
    given = long if path == COMPLETIONS else [{"role": "user", "content": long}]
    error = refused(router, path, **{name: given}, stream=stream)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    error = refused(router, path, max_tokens=100_000, stream=stream)
    assert "512" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_message_is_short_whatever_was_sent(router: RouterProcess, path: str) -> None:
    """It quotes neither a whole field nor each of a thousand faults."""
    for fields in (
        {"temperature": "x" * 100_000},
        {"stop": [{"a": n} for n in range(1000)]},
        {"logit_bias": {f"token {n}": "x" for n in range(1000)}},
        {"y" * 5000: 1},
        {"response_format": {"type": "z" * 50_000}},
    ):
        error = refused(router, path, **fields)
        assert len(error["message"]) < 2000, fields
        assert len(error["param"] or "") < 2000


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "structural_tag", "format": {"type": "any text"}},
        {"type": "structural_tag", "format": {"type": "any_text"}, "json_schema": {"schema": {}}},
        {"type": "structural_tag", "format": {"type": "regex", "pattern": "["}},
        {"type": "json_object", "format": {"type": "any_text"}},
        {"type": "structural_tag"},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
        {"type": None},
        "json_object",
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_format_that_cannot_be_followed_is_refused(router: RouterProcess, path: str, format_: Any) -> None:
    assert refused(router, path, response_format=format_)["param"].startswith("response_format")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_schema_of_any_depth_does_no_harm(router: RouterProcess, path: str) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = router.http.post(path, json={**BODIES[path], "response_format": given})
    assert answer.status_code in (200, 400)
    assert taken(router, path)["choices"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_structural_tags_of_any_depth_do_no_harm(router: RouterProcess, path: str) -> None:
    opened, innermost = '{"type": "tag", "begin": "(", "end": ")", "content": ', '{"type": "any_text"}'
    for depth, statuses in ((20, {200}), (200, {200, 400}), (2000, {400}), (50_000, {400})):
        given = json.dumps({**BODIES[path], "response_format": {"type": "structural_tag", "format": 0}})
        nested = f"{opened * depth}{innermost}{'}' * depth}"
        body = given.replace('"format": 0', f'"format": {nested}')
        headers = {"content-type": "application/json"}
        assert router.http.post(path, content=body, headers=headers).status_code in statuses, depth
        as_text = {
            **BODIES[path],
            "structured_outputs": {"structural_tag": f'{{"format": {nested}}}'[:120_000]},
        }
        assert router.http.post(path, json=as_text).status_code in statuses, depth
    assert taken(router, path)["choices"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"regex": {"1": "Python"}}, {"regex": "["}, {"grammar": ""}, {"grammar": "start: x"}, {"choice": "a"},
        {"choice": []}, {"json": "{"}, {"json": 3}, {"regex": "a", "choice": ["a"]}, {"structural_tag": "{}"},
        [], {"regex": "a\x00b("},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_structured_outputs_are_checked(router: RouterProcess, path: str, wrong: Any) -> None:
    assert refused(router, path, structured_outputs=wrong)["param"].startswith("structured_outputs")


def test_suffixes_and_embedded_prompts_are_refused(router: RouterProcess) -> None:
    assert refused(router, COMPLETIONS, suffix="b")["param"] == "suffix"
    assert refused(router, COMPLETIONS, prompt_embeds="AAAA")["param"] == "prompt_embeds"
    assert refused(router, CHATS, echo=True)["param"] == "echo"
    taken(router, CHATS, echo=False)
    taken(router, COMPLETIONS, suffix="")
    taken(router, COMPLETIONS, suffix=None)


def test_what_is_about_a_stream_needs_one(router: RouterProcess) -> None:
    for path in (COMPLETIONS, CHATS):
        for options in ({"include_usage": True}, {"include_usage": False}, {"continuous_usage_stats": True}):
            assert refused(router, path, stream_options=options)["param"] == "stream_options"
        taken(router, path, stream_options=None)


def test_texts_of_several_parts_are_one_text(service: tuple[RouterProcess, FakeWorker]) -> None:
    """Of every role; a name beside them is the template's to know."""
    router, worker = service

    def prompt(messages: list[dict[str, Any]]) -> bytes:
        taken(router, CHATS, messages=messages)
        started = [message for message in worker.seen if isinstance(message, Decode)]
        return started[-1].request.prompt

    roles = ("system", "user", "assistant", "user")
    plain = [{"role": role, "content": f"Of {role}"} for role in roles]
    parts = [{"role": role, "content": [{"type": "text", "text": f"Of {role}"}]} for role in roles]
    assert prompt(plain) == prompt(parts)
    assert prompt([{**one, "name": "somebody", "more": {"a": 1}} for one in plain]) == prompt(plain)
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt([{"role": "user", "content": two}]) == prompt([{"role": "user", "content": "a\nb"}])
    refused_once = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    joined = {"role": "assistant", "content": "a\nno"}
    assert prompt([USER, {"role": "assistant", "content": refused_once}]) == prompt([USER, joined])
    refused(router, CHATS, messages=[{"role": "user", "content": refused_once}])
    called = {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip
    answered = [
        [USER, called, {"role": "tool", "tool_call_id": "c", "content": said}] for said in ("3", None)
    ]
    answered[1][-1]["content"] = [{"type": "text", "text": "3"}]
    assert prompt(answered[0]) == prompt(answered[1])


@pytest.mark.parametrize(
    "kind", ["image_url", "input_audio", "video_url", "audio_url", "file", "image_embeds"]
)
@pytest.mark.parametrize("role", ["user", "system"])
def test_only_text_is_taken(router: RouterProcess, role: str, kind: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:,"}}]
    error = refused(router, CHATS, messages=[{"role": role, "content": content}])
    assert error["param"] == "messages"


def test_a_responses_numbers_are_checked(service: tuple[RouterProcess, FakeWorker]) -> None:
    """And sampling that other APIs know is taken there, too."""
    router, worker = service
    for name, wrong in (
        ("max_output_tokens", (0, -1, "x")),
        ("temperature", (-1, "x")),
        ("top_p", (2,)),
        ("seed", (2**63,)),
        ("min_p", (2,)),
        ("top_logprobs", (21,)),
        ("instructions", (3,)),
        ("prompt_cache_key", (3,)),
        ("parallel_tool_calls", ("x",)),
        ("reasoning", ({"effort": "hard"}, 3)),
    ):
        for value in wrong:
            assert (refused(router, RESPONSES, **{name: value})["param"] or "").startswith(name)
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "repetition_penalty": 1.1}
    taken(router, RESPONSES, **sent, top_logprobs=None, parallel_tool_calls=None, stop="never this")
    sampling = [one for one in worker.seen if isinstance(one, Decode)][-1].request.sampling
    assert {name: getattr(sampling, name) for name in sent} == sent


def test_efforts_are_those_that_templates_know(router: RouterProcess) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", None):
        taken(router, CHATS, reasoning_effort=effort)
    for effort in ("extreme", "", 3, ["low"]):
        assert refused(router, CHATS, reasoning_effort=effort)["param"] == "reasoning_effort"
        assert refused(router, CHATS, reasoning={"effort": effort})["param"].startswith("reasoning")
