"""Messages of a chat as chat templates expect them.

Templates are written for what transformers gives them, which is not quite what OpenAI's API takes: there the
arguments of a tool call are a text, and any field may be null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's. A template may name others."""

_INSTRUCT = ("system", "developer")
_BILLING = "x-anthropic-billing-header:"

END_OF_CONTENT = "END_OF_CONTENT_TO_GO_ON_WITH "
"""Put behind a content with which the answer goes on. Its last character shows whether a template trims."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def without_billing_lines(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the line that Claude Code puts before its instructions:

        x-anthropic-billing-header: cc_version=...; cc_entrypoint=...; cch=...;

    It is for Anthropic's servers and differs in each request, so that no prompt would begin like the one
    before it, and nothing of that would be in a cache. Instructions of nothing else are left out.
    """
    kept = []
    for message in messages:
        content = message.get("content")
        if message.get("role") in _INSTRUCT and isinstance(content, str) and content.startswith(_BILLING):
            while content.startswith(_BILLING):
                content = content.partition("\n")[2]
            if not content:
                continue
            message = {**message, "content": content}
        kept.append(message)
    return kept or messages


def with_parsed_arguments(message: dict[str, Any], place: str) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, as templates expect them.

    Arguments that are not the JSON of an object stay the text that they are: the model wrote them, and a
    conversation in which it once did so has to go on. (vLLM replaces them by {}.) No arguments are {}.
    Raises InvalidRequest for calls without a function; `place` is what the error names.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place}.tool_calls: a list is needed", "messages")
    parsed = [_parsed_call(call, f"{place}.tool_calls.{number}") for number, call in enumerate(calls)]
    return {**message, "tool_calls": parsed or None}  # templates take an empty list for a call


def _parsed_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place}: only calls of a function, with its name, are supported", "messages")
    return {**call, "function": {**function, "arguments": _parsed_arguments(function.get("arguments"))}}


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as a text."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _parsed_arguments(arguments: Any) -> Any:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What a template asks of messages."""

    words: frozenset[str]  # constants of the template, among them the roles that it names
    asks_for_none: bool  # it tests whether a content is none
    joins_arguments: bool  # it joins a call's arguments with texts, and never asks whether they are one
    left_out: frozenset[str] = frozenset()  # roles that it leaves out, or refuses, behind a system message
    left_out_later: frozenset[str] = frozenset()  # and behind a user's


def as_templates_expect(messages: list[dict[str, Any]], needs: TemplateNeeds) -> list[dict[str, Any]]:
    """The messages for a template.

    Many templates leave out a message whose role they do not know. So a role must be OpenAI's or the
    template's, and a developer's message is a system's for a template that does not name developers. Many
    have one place for instructions: what would be left out is part of the first message, or later a user's.
    A content of null is always there: beside calls as None for a template that asks for it (DeepSeek's
    renders them only then), else as "" (others would print "None", or fail). Arguments of calls are JSON for
    a template that joins them with other texts. Raises InvalidRequest.
    """
    expected: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and role not in needs.words:
            raise InvalidRequest(
                f"messages.{number}.role: {role[:64]!r} is none of {', '.join(ROLES)}", "messages"
            )
        if role == "developer" and role not in needs.words:
            message = {**message, "role": "system"}
        if needs.joins_arguments and message.get("tool_calls"):
            message = {**message, "tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        is_none = needs.asks_for_none and message.get("tool_calls")
        _add(expected, _with_usual_fields(message, None if is_none else ""), needs)
    return expected


def _add(expected: list[dict[str, Any]], message: dict[str, Any], needs: TemplateNeeds) -> None:
    """Add a message where the template does not leave it out."""
    if len(expected) == 1 and expected[0]["role"] in _INSTRUCT and message["role"] in needs.left_out:
        texts = [one.get("content") for one in (expected[0], message)]
        expected[0] = {**expected[0], "content": "\n\n".join(text for text in texts if text)}
    elif expected and expected[-1]["role"] not in _INSTRUCT and message["role"] in needs.left_out_later:
        expected.append({**message, "role": "user"})
    else:
        expected.append(message)


def up_to_content(rendered: str) -> str:
    """A rendered chat up to where its last message's content ends, as transformers' continue_final_message.

    Raises InvalidRequest if the template left the content out.
    """
    end = rendered.rfind(END_OF_CONTENT.strip())
    if end < 0:
        raise InvalidRequest("the chat template leaves out the last message's text", "continue_final_message")
    kept = rendered[:end]
    return kept if rendered.startswith(END_OF_CONTENT, end) else kept.rstrip()


def _with_usual_fields(message: dict[str, Any], no_content: str | None) -> dict[str, Any]:
    """The message with its reasoning under two names, and without nulls: templates test whether fields are
    defined. A call's content may be left out, which is the same as null."""
    present = {key: value for key, value in message.items() if value is not None}
    if "content" in message or "tool_calls" in present:
        present.setdefault("content", no_content)
    for name in _REASONING_NAMES:
        if name in present:
            return {"thinking": present[name], **present, "reasoning_content": present[name]}
    return present


def in_plainer_form(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that has refused them. What was said beside calls is behind what was
    thought: gpt-oss's refuses both, and takes either for thoughts. Each call has a message of its own, before
    its result: Llama 3's refuses several. Arguments that are no object are {}: Qwen3-Coder's and GLM's take
    nothing else."""
    turns: list[list[dict[str, Any]]] = []
    by_call: dict[Any, list[dict[str, Any]]] = {}  # the latest turn of each id
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in by_call:
            by_call[message["tool_call_id"]].append(message)
            continue
        calls = message.get("tool_calls")
        if not calls:
            turns.append([message])
            continue
        said = _with_text_in_thoughts(message)
        for call in calls:
            turns.append([{**said, "tool_calls": [_with_object(call)]}])
            by_call[call.get("id")] = turns[-1]
            said = {"role": message["role"], "content": ""}
    return [message for turn in turns for message in turn]


def _with_text_in_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    text, thoughts = message.get("content"), message.get("thinking")
    if not (text and thoughts):
        return message
    names = {name: f"{thoughts}\n\n{text}" for name in _REASONING_NAMES if name in message}
    return {**message, "content": "", **names}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": {}}}


def with_all_fields(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools with a description and a schema: some templates fail for one that has none."""
    return [{**tool, "function": _with_all_fields(tool.get("function"))} for tool in tools]


def _with_all_fields(function: Any) -> Any:
    """Not every caller has checked it."""
    if not isinstance(function, dict) or not isinstance(schema := function.get("parameters") or {}, dict):
        return function
    described = {"description": "", **{name: value for name, value in function.items() if value is not None}}
    return {**described, "parameters": {"type": "object", "properties": {}, **schema}}
