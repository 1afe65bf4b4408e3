"""From Anthropic's messages to those that chat templates expect, which are OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.api.anthropic.blocks import (
    AssistantMessage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

_Message = SystemMessage | UserMessage | AssistantMessage


def template_messages(
    system: str | Sequence[TextBlock], messages: Sequence[_Message]
) -> list[dict[str, Any]]:
    """The chat. Results of tools become messages of their own, before and after what the user says.

    Raises InvalidRequest for a result of a call that nobody has made.
    """
    chat: list[dict[str, Any]] = [{"role": "system", "content": _joined(system)}] if system else []
    called: dict[str, str] = {}  # id of a call -> name of the tool
    for place, message in enumerate(messages):
        if isinstance(message, SystemMessage):
            chat.append({"role": "system", "content": _joined(message.content)})
        elif isinstance(message, UserMessage):
            chat += _of_user(message, called, f"messages.{place}.content")
        else:
            chat.append(_of_assistant(message, called))
    return chat


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _of_user(message: UserMessage, called: dict[str, str], place: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    chat: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in called:
                raise InvalidRequest(
                    f"{place}.{number}.tool_use_id: no tool_use block before it has this id", "messages"
                )
            text = _joined(block.content)
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "name": called[block.tool_use_id]}
            chat.append({**result, "content": f"Error: {text}" if block.is_error else text})
        elif chat and chat[-1]["role"] == "user":
            chat[-1]["content"] += "\n" + block.text
        else:
            chat.append({"role": "user", "content": block.text})
    return chat or [{"role": "user", "content": ""}]


def _of_assistant(message: AssistantMessage, called: dict[str, str]) -> dict[str, Any]:
    """Texts follow one another as the model wrote them."""
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            called[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    told: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        told["reasoning_content"] = "".join(thoughts)
    return {**told, "tool_calls": calls} if calls else told
