"""Anthropic's Messages API: what reaches the chat template, and what comes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequest, Overloaded
from router.api.answer_parts import AnswerParts
from router.api.anthropic.answers import MessageDraft, MessageEvents
from router.api.anthropic.output import MessageBlocks
from router.api.anthropic.schema import MessagesBody
from router.api.request_body import parse
from router.streams.generation import Submission
from router.text.chat import Chat
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content, Reasoning
from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import FakeWorker, expected_tokens
from tests.support.sse import sse_events
from wire.codec import pack_tokens
from wire.messages.rooms import Decode
from wire.records import Role
from wire.request import SamplingParams

KEY = "a key of at least 16 characters"
USER = {"role": "user", "content": "Hello there"}
BODY: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 12}
CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
CALLED = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
CONTEXT = 512


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def result(of: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, "content": content, **more}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "t1", "name": "add", "content": content}


CHATS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": [USER]}, [USER]),
    ({"system": "Be brief", "messages": [USER]}, [{"role": "system", "content": "Be brief"}, USER]),
    (
        {"system": [text("a"), text("b")], "messages": [user(text("c"), text("d"))]},
        [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c\nd"}],
    ),
    (
        {"messages": [USER, assistant(THOUGHT, text("let "), text("me"), CALL), user(result("t1", "3"))]},
        [
            USER,
            {"role": "assistant", "content": "let me", "reasoning_content": "hm", "tool_calls": [CALLED]},
            tool("3"),
        ],
    ),
    (
        {"messages": [USER, assistant(CALL), user(result("t1", [text("3")], is_error=True), text("and?"))]},
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            tool("Error: 3"),
            {"role": "user", "content": "and?"},
        ],
    ),
    (
        {"messages": [USER, assistant({"type": "redacted_thinking", "data": "x"}, text("ok")), USER]},
        [USER, {"role": "assistant", "content": "ok"}, USER],
    ),
    (
        {"system": [text("x-anthropic-billing-header: cch=1;"), text("a"), text("b")], "messages": [USER]},
        [{"role": "system", "content": "a\nb"}, USER],
    ),
    (
        {"messages": [USER, {"role": "system", "content": "now"}, USER]},
        [USER, {"role": "system", "content": "now"}, USER],
    ),
]


@pytest.mark.parametrize(("fields", "messages"), CHATS)
def test_blocks_become_the_messages_of_a_template(
    fields: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    chat = parse(MessagesBody, {**BODY, **fields}).make_chat()
    assert chat.messages == messages
    assert (chat.add_generation_prompt, chat.continues) == (True, False)


def test_an_answer_goes_on_with_the_last_message() -> None:
    chat = parse(
        MessagesBody, {**BODY, "messages": [USER, {"role": "assistant", "content": "It"}]}
    ).make_chat()
    assert (chat.add_generation_prompt, chat.continues) == (False, True)


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"output_config": {"effort": "low"}},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
    ],
)
def test_whether_to_think_is_the_templates_to_know(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert parse(MessagesBody, {**BODY, **fields}).make_chat().template_kwargs == kwargs


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": 1}, "'seed' is not supported"),
    ({"mcp_servers": [{"name": "x"}]}, "tools are called by the client"),
    ({"messages": []}, "messages"),
    ({"messages": [user({"type": "image", "source": {}})]}, "'image'"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "'tool'"),
    ({"messages": [user(result("t9", "a"))]}, r"messages\.0\.content\.0\.tool_use_id"),
    ({"messages": [USER, assistant(CALL)]}, "their results are missing"),
    ({"messages": [user({"type": "text", "text": "a", "more": 1})]}, r"content\.0\.text\.more"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "'web_search_20250305' is not supported",
    ),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tool_choice": {"type": "any"}}, "no tools to choose from"),
    ({"tool_choice": {"type": "tool"}}, "belongs to type 'tool'"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "display"),
    ({"output_config": {"format": {"type": "text"}}}, "json_schema"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse(MessagesBody, {**BODY, **fields}).make_chat()


def test_a_stream_that_fails_ends_with_anthropics_error() -> None:
    submission = Submission(request_id="r", prompts=[[1]], sampling=SamplingParams())
    events = MessageEvents(MessageDraft(submission, AnswerParts(None, 0), cut=False))
    (failed,) = sse_events(events.failure(Overloaded("full", 1.0)).decode().split("\n"))
    assert failed.kind == "error"
    assert failed.json == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
    (ping,) = sse_events(events.waiting.decode().split("\n"))
    assert (ping.kind, ping.json) == ("ping", {"type": "ping"})


PARTS = [
    [Reasoning("h"), Reasoning("m")], [Content("I "), Content("add")], [CallStart(0, "c1", "add")],
    [CallArguments(0, '{"a"'), CallArguments(0, ":1}")], [CallStart(1, "c2", "sub")],
    [CallBroken(1, "<call>")], [Content("!")],
]  # fmt: skip
ADD = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}


def test_parts_become_blocks_and_events() -> None:
    blocks = MessageBlocks()
    events = [event for parts in PARTS for event in blocks.add(parts, False)] + list(blocks.close())
    assert blocks.whole == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "I add"}, ADD,
        {"type": "text", "text": "<call>!"},
    ]  # fmt: skip
    started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use", "tool_use", "text"]
    stopped = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stopped == list(range(5))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[:2] == [
        {"type": "thinking_delta", "thinking": "h"},
        {"type": "thinking_delta", "thinking": "m"},
    ]
    assert [delta["partial_json"] for delta in deltas if "partial_json" in delta] == ['{"a"', ":1}"]
    assert blocks.calls


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        (r'{"\uDE00": "x\ude00\ud83dy"}', {"\ufffd": "x\ufffd\ufffdy"}),
        (r'{"a": "\ud83d\ude00 \\ud83d"}', {"a": "\U0001f600 \\ud83d"}),
        ('{"a": [1e999, -1E400, 1.5]}', {"a": [sys.float_info.max, -sys.float_info.max, 1.5]}),
        ('{"a": %s}' % ("9" * 4000), {"a": int("9" * 4000)}),
    ],
    ids=lambda one: str(one)[:24],
)
def test_whatever_json_a_model_writes_can_be_told(arguments: str, given: dict[str, Any]) -> None:
    blocks = MessageBlocks()
    list(blocks.add([CallStart(0, "c1", "add"), CallArguments(0, arguments)], False))
    list(blocks.close())
    assert blocks.whole[0]["input"] == given
    assert json.loads(msgspec.json.encode(blocks.whole))[0]["input"] == given


def test_a_call_that_breaks_off_is_text_in_a_whole_message_only() -> None:
    blocks = MessageBlocks()
    events = list(
        blocks.add([CallStart(0, "c1", "add"), CallArguments(0, '{"a'), CallBroken(0, "<x>")], True)
    )
    assert blocks.whole == [{"type": "text", "text": "<x>"}]
    assert not blocks.calls
    assert [event["type"] for event in events] == ["content_block_start", "content_block_delta"]


# -- with a router ---------------------------------------------------------------------------------

Service = tuple[RouterProcess, FakeWorker]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """With a key, and a worker for both phases."""
    directory = tmp_path_factory.mktemp("messages")
    (directory / "keys.yaml").write_text(json.dumps([{"key": KEY, "tenant": "gold"}]))
    router = start_router(directory, model, api_keys_file=str(directory / "keys.yaml"))
    router.http.headers["x-api-key"] = KEY
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=CONTEXT, step_s=0.001)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


@pytest.fixture(scope="module")
def tokenization(model: Path) -> Tokenization:
    return Tokenization(model)


def said(tokenization: Tokenization, count: int) -> tuple[int, str]:
    """Tokens of the prompt of BODY, and the text of its answer."""
    prompt = tokenization.encode_chat(Chat([USER]))
    detokenizer = tokenization.detokenizers.make()
    tokens = expected_tokens(pack_tokens(prompt), count)
    return len(prompt), "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def stream_of(router: RouterProcess, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    with router.http.stream("POST", "/v1/messages", json={**BODY, **fields, "stream": True}) as response:
        assert response.status_code == 200
        return [(event.kind, event.json) for event in sse_events(response.iter_lines())]


def test_a_message(service: Service, tokenization: Tokenization) -> None:
    router, worker = service
    answer = router.http.post("/v1/messages", json=BODY).json()
    prompt, want = said(tokenization, 12)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message", "role": "assistant", "model": "tiny", "content": [{"type": "text", "text": want}],
        "stop_reason": "max_tokens", "stop_sequence": None,
        "usage": {
            "input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": 12,
        },
    }  # fmt: skip
    assert worker.count(Decode) == 1


def test_a_stream_has_anthropics_events(service: Service, tokenization: Tokenization) -> None:
    router, _ = service
    events = stream_of(router)
    assert all(name == event["type"] for name, event in events)
    (_, start), (_, opened), *deltas, (_, closed), (_, ended), (last, _) = events
    prompt, want = said(tokenization, 12)
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == prompt
    assert opened == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert {delta["index"] for _, delta in deltas} == {0}
    assert "".join(delta["delta"]["text"] for _, delta in deltas) == want
    assert closed == {"type": "content_block_stop", "index": 0}
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 12
    assert last == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop_sequences": ["<stop>"]}, "stop_sequence"),
        ({"max_tokens": 10_000}, "model_context_window_exceeded"),
    ],
)
def test_why_a_message_ended(
    service: Service, tokenization: Tokenization, fields: dict[str, Any], reason: str, stream: bool
) -> None:
    router, _ = service
    _, whole = said(tokenization, 64)
    stop = whole[20:26]
    if "stop_sequences" in fields:
        fields = {"stop_sequences": [stop], "max_tokens": 64}
    if stream:
        events = [event for _, event in stream_of(router, **fields)]
        ending, got = events[-2]["delta"], "".join(e["delta"]["text"] for e in events[2:-3])
    else:
        ending = router.http.post("/v1/messages", json={**BODY, **fields}).json()
        got = "".join(block["text"] for block in ending["content"])
    assert ending["stop_reason"] == reason
    assert ending["stop_sequence"] == (stop if reason == "stop_sequence" else None)
    assert reason != "stop_sequence" or got == whole[: whole.index(stop)]


def test_tokens_are_counted(service: Service, tokenization: Tokenization) -> None:
    router, _ = service
    body = {"model": "tiny", "messages": [USER]}
    answer = router.http.post("/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": said(tokenization, 1)[0]}


@pytest.mark.parametrize(
    ("asked", "status", "kind", "words"),
    [
        ({"json": {**BODY, "tools": [{"type": "bash_1"}]}}, 400, "invalid_request_error", "tools"),
        ({"json": {**BODY, "model": "other"}}, 404, "not_found_error", "other"),
        ({"json": {**BODY, "system": "x" * 2000}}, 400, "invalid_request_error", "prompt is too long: "),
        ({"json": BODY, "headers": {"x-api-key": KEY + "!"}}, 401, "authentication_error", "x-api-key"),
        ({"content": b"{"}, 400, "invalid_request_error", "JSON"),
        ({"content": b"{}", "headers": {"content-type": "text/html"}}, 415, "invalid_request_error", "type"),
    ],
)
def test_errors_have_anthropics_shape(
    service: Service, asked: dict[str, Any], status: int, kind: str, words: str
) -> None:
    router, _ = service
    answer = router.http.post("/v1/messages", **asked)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert words in error["error"]["message"]


def test_paths_and_keys(service: Service) -> None:
    router, _ = service
    assert router.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert router.http.post("/v1/messages/more").json()["error"]["type"] == "not_found_error"
    both = {"authorization": f"Bearer {KEY}", "x-api-key": "no key"}
    assert router.http.get("/v1/models", headers=both).status_code == 200
