"""Tools and reasoning at /v1/messages and /v1/responses: a worker that says what a test writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.text.chat import Chat
from tests.router.api.test_tools import ARGUMENTS, OUTPUT, Scripted
from tests.support.sse import sse_events
from wire.codec import unpack_tokens
from wire.messages.rooms import Decode

USER = {"role": "user", "content": "Hi"}
FUNCTIONS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
CLIENT_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
]
MESSAGE = {"messages": [USER], "max_tokens": 2048, "tools": CLIENT_TOOLS}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    made = Scripted(tmp_path_factory.mktemp("tool_doors"))
    made.output = OUTPUT
    yield made
    made.worker.close()
    assert made.router.stop() == 0


def post(scripted: Scripted, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = scripted.router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(scripted: Scripted, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with scripted.router.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        return [event.json for event in sse_events(answer.iter_lines())]


def last_prompt(scripted: Scripted) -> list[int]:
    started = [message for message in scripted.worker.seen if isinstance(message, Decode)]
    return unpack_tokens(started[-1].request.prompt).tolist()


def test_a_message_and_its_stream(scripted: Scripted) -> None:
    message = post(scripted, "/v1/messages", MESSAGE)
    thought, text, first, second = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "I see."}
    assert [(call["type"], call["name"], call["input"]) for call in (first, second)] == [
        ("tool_use", "f", json.loads(ARGUMENTS)), ("tool_use", "g", {}),
    ]  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    told = events(scripted, "/v1/messages", MESSAGE)
    blocks = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["name"] for block in blocks[2:]] == ["f", "g"]
    deltas = [event for event in told if event["type"] == "content_block_delta"]
    inputs = ["".join(one["delta"]["partial_json"] for one in deltas if one["index"] == at) for at in (2, 3)]
    assert inputs == [ARGUMENTS, "{}"]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_message_goes_back_as_it_came(scripted: Scripted) -> None:
    message = post(scripted, "/v1/messages", MESSAGE)
    result = {"type": "tool_result", "tool_use_id": message["content"][2]["id"], "content": "3"}
    turns = [
        USER,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    post(scripted, "/v1/messages", {**MESSAGE, "messages": turns})
    counted = post(scripted, "/v1/messages/count_tokens", {"messages": turns, "tools": CLIENT_TOOLS})
    assert counted["input_tokens"] == len(last_prompt(scripted))


@pytest.mark.parametrize("choice", ["none", "one"])
def test_how_tools_are_chosen(scripted: Scripted, choice: str) -> None:
    given = {"type": "none"} if choice == "none" else {"type": "auto", "disable_parallel_tool_use": True}
    message = post(scripted, "/v1/messages", {**MESSAGE, "tool_choice": given})
    parallel = {"tool_choice": "none"} if choice == "none" else {"parallel_tool_calls": False}
    response = post(scripted, "/v1/responses", {"input": "Hi", "tools": FUNCTIONS, **parallel})
    calls = 0 if choice == "none" else 1
    assert [block["type"] for block in message["content"]].count("tool_use") == calls
    assert [item["type"] for item in response["output"]].count("function_call") == calls
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")


def test_a_response_and_its_stream(scripted: Scripted) -> None:
    asked = {"input": "Hi", "tools": FUNCTIONS}
    response = post(scripted, "/v1/responses", asked)
    thought, said, first, second = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "I see."
    assert [(call["name"], call["arguments"]) for call in (first, second)] == [("f", ARGUMENTS), ("g", "{}")]
    assert response["status"] == "completed"
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    told = events(scripted, "/v1/responses", asked)
    assert told[-1]["type"] == "response.completed"
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert told[-1]["response"]["output"] == done
    mine = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in done]
    assert mine == [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]
    arguments = [one["delta"] for one in told if one["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == ARGUMENTS + "{}"
    assert len(arguments) > 4


def test_reasoning_in_the_form_of_a_summary(scripted: Scripted) -> None:
    asked = {"input": "Hi", "reasoning": {"summary": "auto"}}
    one = post(scripted, "/v1/responses", asked)["output"][0]
    assert one["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in one
    told = [event for event in events(scripted, "/v1/responses", asked) if "summary_index" in event]
    name = "response.reasoning_summary_"
    assert told[0]["type"] == f"{name}part.added"
    assert "".join(event["delta"] for event in told if event["type"] == f"{name}text.delta") == "Hm."
    assert [event["type"] for event in told[-2:]] == [f"{name}text.done", f"{name}part.done"]


@pytest.mark.parametrize("kept", [True, False])
def test_the_next_turn_has_what_the_last_one_said(scripted: Scripted, kept: bool) -> None:
    """Kept, or sent back by the client: the prompt is the same."""
    asked = {"tools": FUNCTIONS}
    one = post(scripted, "/v1/responses", {**asked, "input": "Hi"})
    *_, first, second = one["output"]
    gave = {"type": "function_call_output", "call_id": first["call_id"], "output": "3"}
    if kept:
        post(scripted, "/v1/responses", {**asked, "input": [gave], "previous_response_id": one["id"]})
    else:
        post(scripted, "/v1/responses", {**asked, "input": [USER, *one["output"], gave]})
    calls = [
        {
            "id": call["call_id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments},
        }
        for call, arguments in ((first, json.loads(ARGUMENTS)), (second, {}))
    ]
    said = {"role": "assistant", "content": "I see.", "reasoning_content": "Hm.", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": first["call_id"], "name": "f", "content": "3"}
    chat = Chat([USER, said, result], CHAT_TOOLS)
    assert last_prompt(scripted) == scripted._tokenization.encode_chat(chat)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_a_name_of_any_length_is_kept(scripted: Scripted, stream: bool) -> None:
    """What the model wrote is not checked as what clients send is. It may be sent back, too."""
    name, asked = "f" * 300, {"tools": FUNCTIONS, "input": "Hi"}
    scripted.output = OUTPUT.replace('"name": "g"', f'"name": "{name}"')
    try:
        if stream:
            one = events(scripted, "/v1/responses", asked)[-1]["response"]
        else:
            one = post(scripted, "/v1/responses", asked)
        message = post(scripted, "/v1/messages", MESSAGE)
    finally:
        scripted.output = OUTPUT
    *_, first, second = one["output"]
    assert (one["status"], one["store"], second["name"]) == ("completed", True, name)
    gave = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        for call in (first, second)
    ]
    post(scripted, "/v1/responses", {**asked, "input": gave, "previous_response_id": one["id"]})
    kept = last_prompt(scripted)
    assert name in scripted._tokenization.decode(kept)
    items = [USER, *({"type": "item_reference", "id": item["id"]} for item in one["output"]), *gave]
    post(scripted, "/v1/responses", {**asked, "input": items})
    assert last_prompt(scripted) == kept
    post(scripted, "/v1/responses", {**asked, "input": [USER, *one["output"], *gave]})
    assert last_prompt(scripted) == kept
    turns = [USER, {"role": "assistant", "content": message["content"]}]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
        for block in message["content"] if block["type"] == "tool_use"
    ]  # fmt: skip
    post(scripted, "/v1/messages", {**MESSAGE, "messages": [*turns, {"role": "user", "content": results}]})


def test_required_calls_reach_the_workers_as_a_grammar(scripted: Scripted) -> None:
    """The same one as for a chat."""
    named = {"type": "function", "function": {"name": "f"}}
    for chat, client, function in (
        ("required", {"type": "any"}, "required"),
        (named, {"type": "tool", "name": "f"}, {"type": "function", "name": "f"}),
    ):
        scripted.choice(tools=CHAT_TOOLS, tool_choice=chat)
        post(scripted, "/v1/messages", {**MESSAGE, "tool_choice": client})
        post(scripted, "/v1/responses", {"input": "Hi", "tools": FUNCTIONS, "tool_choice": function})
        started = [message for message in scripted.worker.seen if isinstance(message, Decode)]
        grammars = [message.request.sampling.grammar for message in started[-3:]]
        assert grammars[0] is not None
        assert grammars == grammars[:1] * 3
