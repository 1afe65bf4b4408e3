"""MessageBlocks: from the parts of an answer to the blocks of a message, and the events that tell of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from router.text.output_parts import CallArguments, CallBroken, CallStart, Content, Part, Reasoning

Event = dict[str, Any]
_SIGNATURE = "unsigned"
"""Clients send thoughts back only if they are signed. Nobody looks at it."""
_ESCAPED = re.compile(r"\\(?:(u[dD][89abAB]..\\u[dD][c-fC-F]..)|(u[dD][89a-fA-F]..)|.)")
"""In JSON: the halves of a pair of surrogates, a half alone, or anything else."""
_LARGEST = sys.float_info.max


class MessageBlocks:
    """The blocks of one message. The last one grows. What the events say of a block is complete when the next
    one starts, or with `close`."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._broken: list[dict[str, Any]] = []  # calls among them that are none
        self._texts: list[str] = []  # that the growing block consists of so far
        self._open = False
        self._unsaid = ""  # a call that broke off

    @property
    def whole(self) -> list[dict[str, Any]]:
        """The blocks with broken calls as text. In a stream these have been told of already."""
        said = [block for block in self.blocks if block not in self._broken]
        return [*said, {"type": "text", "text": self._unsaid}] if self._unsaid else said

    @property
    def calls(self) -> bool:
        """Whether the message calls a tool."""
        return any(block["type"] == "tool_use" for block in self.whole)

    def add(self, parts: Iterable[Part], breaks_off: bool) -> Iterator[Event]:
        """Add what follows. Take all events: a block grows with them. `breaks_off`: the output was too long,
        so a call that breaks off is not said once more as text."""
        for part in parts:
            match part:
                case Reasoning(text):
                    yield from self._grow({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta(text, "thinking_delta", "thinking")
                case Content(text):
                    yield from self._grow({"type": "text", "text": ""})
                    yield self._delta(text, "text_delta", "text")
                case CallStart(_, call_id, name):
                    yield from self.close()
                    yield from self._grow({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    yield self._delta(text, "input_json_delta", "partial_json")
                case CallBroken(_, text):
                    self._broken.append(self.blocks[-1])
                    self._texts = []
                    if breaks_off:
                        self._unsaid = text
                    else:
                        yield from self.add([Content(text)], breaks_off)

    def close(self) -> Iterator[Event]:
        """Nothing is added to the block that grows, if one does."""
        if not self._open:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _decoded(text) if text else {}
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta(_SIGNATURE, "signature_delta", "signature")
        self._texts, self._open = [], False
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _grow(self, block: dict[str, Any]) -> Iterator[Event]:
        if self._open and self.blocks[-1]["type"] == block["type"]:
            return
        yield from self.close()
        self.blocks.append(block)
        self._open = True
        told = {"index": len(self.blocks) - 1, "content_block": dict(block)}
        yield {"type": "content_block_start", **told}

    def _delta(self, text: str, kind: str, field: str) -> Event:
        self._texts.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _decoded(text: str) -> Any:
    """The value of a JSON text, such that it can be encoded again: JSON has half characters and numbers that
    no UTF-8 and no float can hold. U+FFFD and the largest number are in their places."""
    whole = _ESCAPED.sub(lambda found: r"\ufffd" if found[2] else found[0], text)
    return json.loads(whole, parse_float=lambda number: max(-_LARGEST, min(float(number), _LARGEST)))
