"""From the items of a conversation to the messages that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.api.openai.responses.items import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    TextPart,
    is_unfinished,
)

_Message = dict[str, Any]


def template_messages(before: Sequence[_Message], items: Sequence[Item]) -> list[_Message]:
    """The messages of `items`, which follow those of earlier turns.

    Reasoning, text and calls that follow one another are one message of the model, and so are an unfinished
    text and the next one. Raises InvalidRequest for the output of a call that nobody has made.
    """
    called = {
        call["id"]: call["function"]["name"] for message in before for call in message.get("tool_calls", ())
    }
    messages: list[_Message] = []
    for place, item in enumerate(items):
        if isinstance(item, FunctionOutputItem):
            if item.call_id not in called:
                raise InvalidRequest(
                    f"input.{place}.call_id: no function_call before it has this id", "input"
                )
            result = {"role": "tool", "tool_call_id": item.call_id, "name": called[item.call_id]}
            messages.append({**result, "content": _joined(item.output, "\n")})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _joined(item.content, "\n")})
        else:
            _add_to_answer(messages, item, called, goes_on=place > 0 and is_unfinished(items[place - 1]))
    return messages


def _joined(content: str | Sequence[TextPart], between: str) -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)


def _add_to_answer(
    messages: list[_Message],
    item: MessageItem | FunctionCallItem | ReasoningItem,
    called: dict[str, str],
    goes_on: bool,
) -> None:
    """`goes_on`: a text is the rest of the one before it."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, FunctionCallItem):
        called[item.call_id] = item.name
        if last is None:
            last = {"role": "assistant", "content": None}
            messages.append(last)
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        if item.text:  # without thoughts there is nothing to repeat
            messages.append({"role": "assistant", "content": None, "reasoning_content": item.text})
    else:
        text = _joined(item.content, "")
        if last is not None and goes_on:
            last["content"] += text
        elif last is not None and last["content"] is None and "tool_calls" not in last:
            last["content"] = text
        else:
            messages.append({"role": "assistant", "content": text})
