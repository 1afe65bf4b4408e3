"""Llama 3's format: `{"name": ..., "parameters": {...}}`, as an answer begins or behind `<|python_tag|>`."""

from __future__ import annotations

import json

from router.text.output_parts import Content
from router.text.output_source import Reading, Source, next_character, skip_space, until
from router.text.tool_formats.calls import Calls, json_call
from router.text.tool_formats.syntax import CallSyntax

TAG = "<|python_tag|>"
MARKERS = (TAG,)


def _call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f'{{"name": {json.dumps(name)}, "parameters": ',), ("}",)


SYNTAX = CallSyntax(_call, trigger="", between=("; ",))


def read(source: Source, calls: Calls) -> Reading[None]:
    """Without the tag, an object is a call if it has the name of a tool."""
    if (yield from next_character(source)) == "{":
        source.record()
        yield from _several(source, calls, only_known=True)
    while True:
        space, found = yield from until(source, MARKERS, Content)
        if not found:
            return
        source.record(space + TAG)
        yield from _several(source, calls, only_known=False)


def _several(source: Source, calls: Calls, only_known: bool) -> Reading[None]:
    """Calls behind one another, with or without semicolons between them."""
    while (yield from json_call(source, calls, only_known)):
        char = yield from skip_space(source)
        source.record()
        if char == ";":
            source.take(1)
            char = yield from skip_space(source)
        if char != "{":
            return
