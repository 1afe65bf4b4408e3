"""Mistral's formats: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and the newer
`[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

import json

from router.text.output_parts import Content
from router.text.output_source import Reading, Source, accept, skip_space, until, word
from router.text.tool_formats.calls import Calls, json_call, named_call
from router.text.tool_formats.syntax import CallSyntax

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = (OPEN, ARGUMENTS, CALL_ID)


def _in_list(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f'{{"name": {json.dumps(name)}, "arguments": ',), ("}",)


def _by_name(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (name, ARGUMENTS), ()


LIST_SYNTAX = CallSyntax(_in_list, trigger=OPEN, opening=(" [",), between=(", ",), closing=("]",))
SYNTAX = CallSyntax(_by_name, trigger=OPEN, between=(OPEN,))


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls of either form."""
    while True:
        space, found = yield from until(source, (OPEN,), Content)
        if not found:
            return
        source.record(space + OPEN)
        char = yield from skip_space(source)
        if char == "[":
            yield from _list(source, calls)
        elif char == "{":
            yield from json_call(source, calls)
        else:
            name = yield from word(source)
            if (yield from accept(source, CALL_ID)):
                yield from word(source)
            yield from accept(source, ARGUMENTS)
            yield from named_call(source, calls, name)


def _list(source: Source, calls: Calls) -> Reading[None]:
    char = ","  # between two, or the bracket before the first one
    while char == ",":
        source.take(1)
        if not (yield from json_call(source, calls)):
            return
        source.record()
        char = yield from skip_space(source)
    if char == "]":
        source.take(1)
        yield from skip_space(source)
