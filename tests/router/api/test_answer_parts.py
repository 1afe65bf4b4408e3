"""What vLLM's and SGLang's own tests want of reasoning, calls and formats: docs/api-parity.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from router.text.chat import Chat
from tests.router.api.test_tools import ARGUMENTS, CHAT, OUTPUT, TOOLS, Scripted
from tests.support.sse import sse_events
from wire.codec import unpack_tokens
from wire.messages.rooms import Decode
from wire.request import GrammarKind, SamplingParams, ThoughtLimit

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    made = Scripted(tmp_path_factory.mktemp("parts"))
    yield made
    made.worker.close()
    assert made.router.stop() == 0


def post(scripted: Scripted, path: str, **body: Any) -> dict[str, Any]:
    answer = scripted.router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(scripted: Scripted, path: str, **body: Any) -> list[dict[str, Any]]:
    with scripted.router.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        return [event.json for event in sse_events(answer.iter_lines()) if event.data != "[DONE]"]


def started(scripted: Scripted) -> Decode:
    return [message for message in scripted.worker.seen if isinstance(message, Decode)][-1]


def sampling(scripted: Scripted) -> SamplingParams:
    return started(scripted).request.sampling


def prompt(scripted: Scripted) -> list[int]:
    found: list[int] = unpack_tokens(started(scripted).request.prompt).tolist()
    return found


WISHES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "parallel_tool_calls": False},
    {"tools": TOOLS, "include_reasoning": False},
    {"tools": TOOLS, "separate_reasoning": False},
    {"tools": TOOLS, "n": 2, "logprobs": True},
]


@pytest.mark.parametrize("fields", WISHES, ids=str)
def test_a_stream_tells_what_a_whole_answer_tells(scripted: Scripted, fields: dict[str, Any]) -> None:
    scripted.output = OUTPUT
    for index, whole in enumerate(post(scripted, "/v1/chat/completions", messages=CHAT, **fields)["choices"]):
        chunks = [chunk for chunk in scripted.chunks(**fields) if chunk["index"] == index]
        deltas = [chunk["delta"] for chunk in chunks]
        for part in ("content", "reasoning_content"):
            assert "".join(delta.get(part) or "" for delta in deltas) == (whole["message"].get(part) or "")
        calls: dict[int, list[str]] = {}
        for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
            function = call["function"]
            calls.setdefault(call["index"], [function.get("name", ""), ""])[1] += function["arguments"]
        told = whole["message"].get("tool_calls", [])
        assert list(calls.values()) == [[*one["function"].values()] for one in told]
        assert chunks[-1]["finish_reason"] == whole["finish_reason"]
        if "logprobs" in fields:
            streamed = [token for chunk in chunks for token in chunk["logprobs"]["content"]]
            assert streamed == whole["logprobs"]["content"]


@pytest.mark.parametrize("wanted", [True, None, False])
def test_reasoning_is_streamed_unless_it_is_not_wanted(scripted: Scripted, wanted: bool | None) -> None:
    scripted.output = "<think>\nHm, so.\n</think>\n\nYes."
    fields = {} if wanted is None else {"include_reasoning": wanted}
    deltas = [chunk["delta"] for chunk in scripted.chunks(**fields)]
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == ("" if wanted is False else "Hm, so.")
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}, {"separate_reasoning": False}], ids=str)
def test_usage_counts_reasoning(scripted: Scripted, fields: dict[str, Any]) -> None:
    def tokens(text: str) -> int:
        return len(scripted._tokenization.encode(text, add_special_tokens=False))

    thoughts = "<think>\nHm, so.\n</think>"
    scripted.output = f"{thoughts}\n\nYes."
    usage = post(scripted, "/v1/chat/completions", messages=CHAT, **fields)["usage"]
    assert usage["completion_tokens"] == tokens(scripted.output) + 1  # and the end
    told_apart = fields.get("separate_reasoning", True)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": tokens(thoughts) if told_apart else 0}
    last = events(
        scripted, "/v1/chat/completions", messages=CHAT, stream_options={"include_usage": True}, **fields
    )[-1]
    assert last["usage"] == usage


def test_a_required_call_has_no_content(scripted: Scripted) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    scripted.output = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'
    for choice in ("required", named):
        message = scripted.choice(tools=TOOLS, tool_choice=choice)["message"]
        assert message["content"] is None
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": ARGUMENTS}
        deltas = [chunk["delta"] for chunk in scripted.chunks(tools=TOOLS, tool_choice=choice)]
        assert not any(delta.get("content") for delta in deltas)
    scripted.output = "Plain."
    assert "tool_calls" not in scripted.choice(tools=TOOLS)["message"]
    assert not any("tool_calls" in chunk["delta"] for chunk in scripted.chunks(tools=TOOLS))


@pytest.mark.parametrize(
    "fields",
    [{"tools": None}, {"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "none"},
     {"tool_choice": "auto"}, {"tools": [], "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}],
    ids=str,
)  # fmt: skip
def test_no_tools_are_none(scripted: Scripted, fields: dict[str, Any]) -> None:
    scripted.output = "Plain."
    plain = scripted.choice()
    of_plain = prompt(scripted)
    assert scripted.choice(**fields) == plain
    assert prompt(scripted) == of_plain
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    flat = {**fields, "tools": functions} if fields.get("tools") else fields
    response = post(scripted, "/v1/responses", input="Hi", **flat)
    assert [item["type"] for item in response["output"]] == ["message"]
    assert prompt(scripted) == of_plain


def test_tools_keep_their_definitions_apart(scripted: Scripted) -> None:
    """Two tools may have definitions of one name that differ, and one may have none."""
    scripted.output = OUTPUT

    def tool(name: str, kind: str) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/thing"}},
            "$defs": {"thing": {"type": kind}},
        }
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    scripted.choice(tools=[tool("f", "string"), tool("g", "integer")], tool_choice="required")
    grammar = sampling(scripted).grammar
    assert grammar is not None
    schemas = re.findall(r'"thing": \{"type": "(\w+)"', (grammar.around or grammar.text).replace("\\", ""))
    assert schemas == ["string", "integer"]
    scripted.choice(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required")
    assert sampling(scripted).grammar is not None


def test_thoughts_of_earlier_turns_have_two_names(scripted: Scripted) -> None:
    scripted.output = "Plain."
    prompts = []
    for thoughts in (
        {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning": "hm", "reasoning_content": "hm"},
    ):  # fmt: skip
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = {"role": "assistant", "content": None, "tool_calls": [call], **thoughts}
        result = {"role": "tool", "tool_call_id": "c", "content": "3"}
        scripted.choice(messages=[USER, said, result], tools=TOOLS)
        prompts.append(prompt(scripted))
    assert prompts == prompts[:1] * 3
    assert "hm" in scripted._tokenization.decode(prompts[0])


@pytest.mark.parametrize(
    ("item", "thoughts"),
    [
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, "hm"),
        ({"summary": [{"type": "summary_text", "text": "hm"}]}, "hm"),
        ({"summary": [{"type": "summary_text", "text": "hm"}], "content": []}, "hm"),
        (
            {
                "summary": [{"type": "summary_text", "text": "short"}],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            "hm",
        ),
        ({"summary": []}, None),
    ],
    ids=str,
)
def test_thoughts_of_a_client_are_their_content_or_summary(
    scripted: Scripted, item: dict[str, Any], thoughts: str | None
) -> None:
    scripted.output = "Plain."
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    gave = {"type": "function_call_output", "call_id": "c", "output": "3"}
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    reasoning = {"type": "reasoning", "id": "rs_1", **item}
    post(scripted, "/v1/responses", input=[USER, reasoning, call, gave], tools=functions)
    said: dict[str, Any] = {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
    }  # fmt: skip
    if thoughts is not None:
        said["reasoning_content"] = thoughts
    result = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "3"}
    assert prompt(scripted) == scripted._tokenization.encode_chat(Chat([USER, said, result], TOOLS))


def test_a_thought_that_goes_on_is_one(scripted: Scripted) -> None:
    scripted.output = " now.\n</think>\n\nYes."
    begun = [USER, {"role": "assistant", "content": "<think>\nLet me see"}]
    message = scripted.choice(messages=begun, continue_final_message=True)["message"]
    assert (message["reasoning_content"], message["content"]) == (" now.", "Yes.")
    thought, text = post(scripted, "/v1/messages", messages=begun, max_tokens=20)["content"]
    assert (thought["thinking"], text["text"]) == (" now.", "Yes.")


def test_an_unfinished_text_of_a_response_goes_on(scripted: Scripted) -> None:
    """What is kept has it as one message."""
    scripted.output = " and Oslo."
    begun = {"role": "assistant", "content": "Rome", "status": "incomplete"}
    response = post(scripted, "/v1/responses", input=[USER, begun])
    chat = Chat([USER, {"role": "assistant", "content": "Rome"}], None, False, {}, True)
    assert prompt(scripted) == scripted._tokenization.encode_chat(chat)
    assert response["output"][-1]["content"][0]["text"] == " and Oslo."
    post(scripted, "/v1/responses", input=[USER], previous_response_id=response["id"])
    whole = {"role": "assistant", "content": "Rome and Oslo."}
    assert prompt(scripted) == scripted._tokenization.encode_chat(Chat([USER, whole, USER]))


def test_an_empty_message(scripted: Scripted) -> None:
    """Of a model that ends at once."""
    scripted.output = ""
    assert scripted.choice()["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert scripted.choice()["finish_reason"] == "stop"
    message = post(scripted, "/v1/messages", messages=[USER], max_tokens=9)
    assert message["stop_reason"] == "end_turn"
    assert message["content"] in ([], [{"type": "text", "text": ""}])
    told = [event["type"] for event in events(scripted, "/v1/messages", messages=[USER], max_tokens=9)]
    assert told[0] == "message_start"
    assert told[-2:] == ["message_delta", "message_stop"]
    assert told.count("content_block_start") == told.count("content_block_stop")
    response = post(scripted, "/v1/responses", input="Hi")
    assert (response["status"], response["usage"]["output_tokens"]) == ("completed", 1)


def test_a_messages_format_reaches_the_workers(scripted: Scripted) -> None:
    scripted.output = '{"a": 1}'
    given = {"format": {"type": "json_schema", "schema": SCHEMA}}
    post(scripted, "/v1/messages", messages=[USER], max_tokens=20, output_config=given)
    grammar = sampling(scripted).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def test_an_error_of_ours_says_nothing_of_the_server(scripted: Scripted) -> None:
    """No file, no class, no address in memory."""
    for path, body in (
        ("/v1/chat/completions", {"messages": 3}),
        ("/v1/chat/completions", {"messages": [3]}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [3]}),
        ("/v1/completions", {"prompt": object.__name__, "stop": 3}),
        ("/v1/responses", {"input": [3]}),
        ("/v1/responses", {"input": [{"type": "message"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": 3}], "max_tokens": 1}),
        ("/generate", {"text": 3}),
        ("/tokenize", {"messages": 3}),
    ):
        answer = scripted.router.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert not re.search(r"0x[0-9a-f]{6}|\.py\b|Traceback|/router/|pydantic|<class", answer.text), (
            answer.text
        )


def test_why_an_output_stopped(scripted: Scripted) -> None:
    scripted.output = "Yes, so."
    end = scripted._end
    for fields, told in [
        ({}, ("stop", None)),
        ({"stop_token_ids": [end]}, ("stop", end)),
        ({"stop": ["?", "so"], "stop_token_ids": [end]}, ("stop", "so")),
        ({"stop": ["so"], "max_tokens": 1}, ("length", None)),
    ]:
        completion = {"prompt": "Hi", "max_tokens": 50, **fields}
        choices = [
            scripted.choice(**fields),
            scripted.chunks(**fields)[-1],
            post(scripted, "/v1/completions", **completion)["choices"][0],
            events(scripted, "/v1/completions", **completion)[-1]["choices"][0],
        ]
        assert [(one["finish_reason"], one["stop_reason"]) for one in choices] == [told] * 4
        assert all("stop_reason" not in one for one in scripted.chunks(**fields)[:-1])


def limit_of(scripted: Scripted, path: str = "/v1/chat/completions", **fields: Any) -> ThoughtLimit | None:
    scripted.output = "Yes."
    post(scripted, path, **{"messages": CHAT, "max_tokens": 50, **fields})
    return sampling(scripted).thoughts


def test_how_long_a_model_may_think(scripted: Scripted) -> None:
    tags = scripted._tokenization.added_ids()
    opening, closing = (tags[tag] for tag in ("<think>", "</think>"))
    said: dict[str, Any] = {"thinking_token_budget": 7}
    assert limit_of(scripted, **said) == ThoughtLimit(7, (closing,), (opening,))
    opened = [*CHAT, {"role": "assistant", "content": "<think>\nHm"}]
    going_on = {"messages": opened, "continue_final_message": True}
    assert limit_of(scripted, **said, **going_on) == ThoughtLimit(7, (closing,))
    closed = [*CHAT, {"role": "assistant", "content": "<think>\nHm</think> Y"}]
    assert limit_of(scripted, **said, messages=closed, continue_final_message=True) is None
    assert limit_of(scripted, thinking_token_budget=0) == ThoughtLimit(0, (closing,), (opening,))
    for nothing in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": 49}):
        assert limit_of(scripted, **nothing) is None
    message = {"path": "/v1/messages", "max_tokens": 50}
    budget = {"type": "enabled", "budget_tokens": 9}
    assert limit_of(scripted, **message, thinking=budget) == ThoughtLimit(9, (closing,), (opening,))
    assert limit_of(scripted, **message, thinking={**budget, "type": "disabled"}) is None
    assert limit_of(scripted, **message) is None


def test_limits_that_are_none_are_refused(scripted: Scripted) -> None:
    answer = scripted.post(thinking_token_budget=-2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
    completion = {"prompt": "a", "thinking_token_budget": 5}
    answer = scripted.router.http.post("/v1/completions", json=completion)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_words_that_may_not_be_said(scripted: Scripted, path: str) -> None:
    asked = {"messages": CHAT} if "chat" in path else {"prompt": "Hi"}
    scripted.output = "Yes."
    post(scripted, path, **asked, max_tokens=50, bad_words=["so", " Yes", "Yes"])
    texts = ["so", " so", "Yes", " Yes"]
    words = [tuple(scripted._tokenization.encode(text, add_special_tokens=False)) for text in texts]
    assert sampling(scripted).bad_words == tuple(words)
    post(scripted, path, **asked, max_tokens=50, bad_words=[])
    assert sampling(scripted).bad_words == ()
