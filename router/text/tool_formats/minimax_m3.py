"""MiniMax-M3's format: elements named like the arguments, with a mark before each tag.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

with more of `<invoke>` for more calls. The elements of an array are `<item>`s, or an element comes several
times; those of an object are named like its keys. An element without others in it is text or JSON, as its
schema says. Arguments are said as a whole: a name that comes once more makes an array of what was before.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from router.text.json_scanner import DEEPEST, nests_deeper
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content
from router.text.output_source import Reading, Source, accept, skip_space, through, until, word
from router.text.tool_formats.calls import Calls
from router.text.tool_formats.xml import read_value, types_of

MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
MARKERS = (MARK,)
_BEFORE_NAME, _BEHIND_NAME = f'{MARK}<invoke name="', '">'
_END = "</invoke>"
_LONGEST_NAME = 256  # characters
_LONGEST_TEXT = 1 << 20


class _Element(NamedTuple):
    """Either has text, or other elements."""

    text: str
    elements: list[tuple[str, _Element]]


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls. What stands around all calls may be missing."""
    while True:
        space, found = yield from until(source, (OPEN, _BEFORE_NAME), Content)
        if not found:
            return
        source.record(space + found)
        begun = yield from _begin(source, calls, found)
        if begun is None:
            yield Content(source.recorded)
            continue
        yield begun
        element = yield from _element(source, _END, 1)
        said = "" if element is None or element.text.strip() else _object(element, calls.schema(begun.name))
        if not said or nests_deeper(json.loads(said)):
            yield CallBroken(begun.index, source.recorded)
            continue
        yield CallArguments(begun.index, said)
        yield from skip_space(source)
        yield from accept(source, CLOSE)
        yield from skip_space(source)


def _begin(source: Source, calls: Calls, found: str) -> Reading[CallStart | None]:
    """The call, if a name follows what was found."""
    yield from skip_space(source)
    if found == OPEN and not (yield from accept(source, _BEFORE_NAME)):
        return None
    name = yield from word(source)
    if not name or not (yield from accept(source, _BEHIND_NAME)):
        return None
    return calls.begin(name)


def _element(source: Source, end: str, level: int) -> Reading[_Element | None]:
    """Take what stands before a mark and `end`, and these; None for what is no element."""
    text = ""
    elements: list[tuple[str, _Element]] = []
    while (before := (yield from through(source, MARK, _LONGEST_TEXT))) is not None:
        text += before
        if (yield from accept(source, end)):
            return None if elements and text.strip() else _Element(text, elements)
        if not (yield from accept(source, "<")) or level == DEEPEST:
            return None
        name = yield from through(source, ">", _LONGEST_NAME)
        if not name or name.startswith("/"):
            return None
        inner = yield from _element(source, f"</{name}>", level + 1)
        if inner is None:
            return None
        elements.append((name, inner))
    return None


def _value(element: _Element, schema: Any) -> str:
    """In JSON."""
    kind, inner = _container(schema)
    if not element.elements:
        if kind and not element.text.strip() and "string" not in types_of(schema):
            return "[]" if kind == "array" else "{}"
        return read_value(element.text, schema, on_lines=False)
    if not kind and all(name == "item" for name, _ in element.elements):
        kind = "array"
    if kind != "array":
        return _object(element, inner)
    return _list([_value(one, inner.get("items")) for _, one in element.elements])


def _object(element: _Element, schema: Mapping[str, Any]) -> str:
    """Of its elements, by name."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    values: dict[str, list[str]] = {}
    times = Counter(name for name, _ in element.elements)
    for name, one in element.elements:
        wanted = properties.get(name, others) if isinstance(properties, Mapping) else others
        kind, inner = _container(wanted)
        if times[name] > 1 and kind == "array":
            wanted = inner.get("items")
        values.setdefault(name, []).append(_value(one, wanted))
    members = (
        f"{json.dumps(name, ensure_ascii=False)}: {said[0] if len(said) == 1 else _list(said)}"
        for name, said in values.items()
    )
    return "{" + ", ".join(members) + "}"


def _list(values: list[str]) -> str:
    return "[" + ", ".join(values) + "]"


def _container(schema: Any) -> tuple[str, Mapping[str, Any]]:
    """Whether a schema has arrays or objects, and which; "": neither."""
    if not isinstance(schema, Mapping):
        return "", {}
    named = schema.get("type")
    types = named if isinstance(named, list) else [named]
    for kind, keys in (("array", ("items",)), ("object", ("properties", "additionalProperties"))):
        if kind in types or (named is None and any(key in schema for key in keys)):
            return kind, schema
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else []:
            if (found := _container(one))[0]:
                return found
    return "", {}
