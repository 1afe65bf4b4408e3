"""What a request gives to a chat template."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from common.errors import InvalidRequest
from router.text import json_scanner
from router.text.messages import without_billing_lines

MOST_TEXT = 4 << 20  # characters and values of a field
DEEPEST = json_scanner.DEEPEST + 8  # nesting of a field: a message has a call's arguments a few levels down


class Chat:
    """Messages, tools and template arguments: plain data parsed from JSON."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
        continues: bool = False,
    ) -> None:
        """`continues`: the answer goes on with the last message's text. Raises InvalidRequest, with the name
        of the field, for too much text or too deep nesting, and for no text to go on with."""
        self.messages = messages = without_billing_lines(messages)
        self.tools = tools
        self.add_generation_prompt = add_generation_prompt
        self.template_kwargs = template_kwargs or {}
        self.continues = continues
        if continues and not (messages and isinstance(messages[-1].get("content"), str)):
            raise InvalidRequest("the last message has no text to go on with", "continue_final_message")
        self.arrived = datetime.now()  # local time: what a template calls now
        self.strings: list[str] = []  # every text, names of fields included
        self.size = 0  # their characters, and one for each value
        self._read("messages", messages)
        if tools:
            self._read("tools", tools)
        if template_kwargs:
            self._read("chat_template_kwargs", template_kwargs)

    @property
    def continued(self) -> str:
        """The text with which the answer goes on; "": it begins a message."""
        return str(self.messages[-1]["content"]) if self.continues else ""

    @property
    def opening(self) -> str:
        """The texts through a user's first message, which the requests of one conversation have in common."""
        texts = []
        for message in self.messages:
            texts.append(str(message.get("content")))
            if message["role"] == "user":
                break
        return "\0".join(texts)

    def _read(self, param: str, value: Any) -> None:
        size = _collect(value, self.strings, DEEPEST, param)
        if size > MOST_TEXT:
            raise InvalidRequest(f"{param} has {size} characters and values, more than {MOST_TEXT}", param)
        self.size += size


def _collect(value: dict[str, Any] | list[Any], found: list[str], levels: int, param: str) -> int:
    """Add all texts to `found`. Returns their characters, and one for each value."""
    if not levels:
        raise InvalidRequest(f"{param} nests deeper than {DEEPEST} levels", param)
    size = len(value)
    if isinstance(value, dict):
        found.extend(value)
        size += sum(map(len, value))
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str):
            found.append(item)
            size += len(item)
        elif isinstance(item, (dict, list)):
            size += _collect(item, found, levels - 1, param)
    return size
