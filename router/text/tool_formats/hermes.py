"""Hermes' format, which is Qwen's, too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json

from router.text.output_parts import Content
from router.text.output_source import Reading, Source, accept, skip_space, until
from router.text.tool_formats.calls import Calls, json_call
from router.text.tool_formats.syntax import CallSyntax

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE)


def _call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f'{{"name": {json.dumps(name)}, "arguments": ',), ("}",)


SYNTAX = CallSyntax(
    _call, trigger=OPEN, opening=("\n",), between=("\n", CLOSE, "\n", OPEN, "\n"), closing=("\n", CLOSE)
)


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls. The closing tag may be missing, and may follow several calls."""
    while True:
        space, found = yield from until(source, (OPEN,), Content)
        if not found:
            return
        source.record(space + OPEN)
        is_call = yield from json_call(source, calls)
        while is_call:
            char = yield from skip_space(source)
            yield from accept(source, CLOSE)
            source.record()
            is_call = char == "{" and (yield from json_call(source, calls))
            if not is_call:
                yield from skip_space(source)
