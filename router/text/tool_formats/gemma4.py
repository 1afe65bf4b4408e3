"""Gemma 4's format: `<|tool_call>call:f{a:1,b:<|"|>text<|"|>,c:[true]}<tool_call|>`, for each call.

Keys are bare. Texts stand between two of a token of their own, with nothing escaped in them. What has none of
these tokens is a text, too, if it is no JSON, or the schema says so. Some models leave the word `call` out.
Arguments are said as they come, texts piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from router.text.json_scanner import DEEPEST
from router.text.output_parts import CallArguments, CallBroken, Content
from router.text.output_source import Reading, Source, accept, pieces, skip_space, through, until, word
from router.text.tool_formats.calls import Calls
from router.text.tool_formats.xml import read_value

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
BEFORE_NAME = "call:"
_LONGEST_KEY = 256  # characters
_LONGEST_BARE = 4096
_BEHIND_KEY = re.compile(r"[:,{}\[\]<]")
_BEHIND_VALUE = re.compile(r"[,}\]<]")


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls."""
    while True:
        space, found = yield from until(source, (OPEN,), Content)
        if not found:
            return
        source.record(space + found)
        yield from skip_space(source)
        name = (yield from word(source)) if (yield from accept(source, BEFORE_NAME, ":")) else ""
        if not name or (yield from skip_space(source)) != "{":
            yield Content(source.recorded)
            continue
        begun = calls.begin(name)
        yield begun
        if not (yield from _members(source, begun.index, calls.schema(name), 1)):
            yield CallBroken(begun.index, source.recorded)
            continue
        yield from skip_space(source)
        yield from accept(source, CLOSE)
        yield from skip_space(source)


def _members(source: Source, index: int, schema: Any, level: int) -> Reading[bool]:
    """Take an object or an array, whose bracket is next. Returns False for what is none."""
    opening, inner = source.take(1), _of(schema, "items")
    closing = "}" if opening == "{" else "]"
    said = opening
    while (char := (yield from skip_space(source))) != closing:
        if said == ", ":
            if char != ",":
                return False
            source.take(1)
            if (yield from skip_space(source)) == closing:
                break
        if opening == "{":
            key = yield from _key(source)
            if not key:
                return False
            said += json.dumps(key, ensure_ascii=False) + ": "
            inner = _of(_of(schema, "properties"), key)
        yield CallArguments(index, said)
        if not (yield from _value(source, index, inner, level)):
            return False
        said = ", "
    source.take(1)
    yield CallArguments(index, closing if said == ", " else opening + closing)
    return True


def _of(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, Mapping) else None


def _value(source: Source, index: int, schema: Any, level: int) -> Reading[bool]:
    """Take a value. Returns False for what is none."""
    char = yield from skip_space(source)
    if (yield from accept(source, QUOTE)):
        return (yield from _text(source, index))
    if char and char in "{[":
        return level < DEEPEST and (yield from _members(source, index, schema, level + 1))
    bare = yield from _before(source, _BEHIND_VALUE, _LONGEST_BARE)
    if bare is None:
        return False
    yield CallArguments(index, read_value(bare.strip(), schema, False))
    return True


def _text(source: Source, index: int) -> Reading[bool]:
    """Take a text and the token behind it. Returns False if there is none."""
    yield CallArguments(index, '"')
    is_whole = yield from pieces(source, QUOTE, lambda piece: CallArguments(index, _escaped(piece)))
    if is_whole:
        yield CallArguments(index, '"')
    return is_whole


def _escaped(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]


def _key(source: Source) -> Reading[str]:
    """Take a key and its colon; "" for what is none."""
    if (yield from accept(source, QUOTE)):
        key = (yield from through(source, QUOTE, _LONGEST_KEY)) or ""
    else:
        key = ((yield from _before(source, _BEHIND_KEY, _LONGEST_KEY)) or "").strip()
    return key if (yield from skip_space(source)) == ":" and source.take(1) else ""


def _before(source: Source, ends: re.Pattern[str], most: int) -> Reading[str | None]:
    """Take the text before the first of these characters; None, with nothing taken, if there is none, or more
    than `most` characters before it."""
    while True:
        if (found := ends.search(source.text, 0, most + 1)) is not None:
            return source.take(found.start())
        if source.ended or len(source.text) > most:
            return None
        yield None
