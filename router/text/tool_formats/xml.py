"""Calls between tags, with an argument for each: Qwen3-Coder's, GLM's, and those of others.

    <tool_call>                                <tool_call>f
    <function=f>                               <arg_key>a</arg_key>
    <parameter=a>                              <arg_value>1</arg_value>
    1                                          </tool_call>
    </parameter>
    </function>
    </tool_call>

Seed-OSS's are Qwen3-Coder's between `<seed:tool_call>` and its end, without line ends around values.
MiniMax-M2 writes all calls of an answer between one `<minimax:tool_call>` and its end:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="a">1</parameter>
    </invoke>
    </minimax:tool_call>

DeepSeek-V3.2 does so, too, and says of each value whether it is a text:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

DeepSeek-V4's are the same between `<｜DSML｜tool_calls>` and its end.

An argument is text or JSON, as its schema says. It is read as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from router.text.json_scanner import nests_deeper
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content
from router.text.output_source import Reading, Source, accept, skip_space, through, until, word
from router.text.tool_formats.calls import Calls

_LONGEST_NAME = 256  # characters
_LONGEST_VALUE = 1 << 20
_PYTHONS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the parts of a call."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    on_lines: bool = True  # a line end may stand before and behind a value, and is none of it
    is_text: str = ""  # what stands between a key and "true" or "false"
    mark: str = ""  # in all tags, in place of which it may be a token of its own

    @property
    def markers(self) -> tuple[str, ...]:
        """Those that may be tokens of their own."""
        if self.mark:
            return (self.mark,)
        return *self.call, *(tag for tag in (*self.key, *self.value) if tag.endswith(">"))


QWEN = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
SEED = replace(QWEN, call=("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX = Tags(
    ('<invoke name="', '">'),
    ('<parameter name="', '">'),
    ("", "</parameter>"),
    "</invoke>",
    call=("<minimax:tool_call>", "</minimax:tool_call>"),
    on_lines=False,
)
DEEPSEEK = Tags(
    ('<｜DSML｜invoke name="', '">'),
    ('<｜DSML｜parameter name="', '">'),
    ("", "</｜DSML｜parameter>"),
    "</｜DSML｜invoke>",
    call=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    on_lines=False,
    is_text='" string="',
    mark="｜DSML｜",
)
DEEPSEEK_V4 = replace(DEEPSEEK, call=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
GLM = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", on_lines=False)


def read(tags: Tags, source: Source, calls: Calls) -> Reading[None]:
    """Content and calls. Where a tag stands before names, the one around a call may be missing."""
    openings = tuple(tag for tag in (tags.call[0], tags.name[0]) if tag)
    while True:
        space, found = yield from until(source, openings, Content)
        if not found:
            return
        source.record(space + found)
        begun = yield from _begin(source, calls, tags, found)
        if begun is None:
            yield Content(source.recorded)
            continue
        yield begun
        if not (yield from _arguments(source, begun, tags, calls.schema(begun.name))):
            yield CallBroken(begun.index, source.recorded)
            continue
        yield from skip_space(source)
        yield from accept(source, tags.call[1])
        yield from skip_space(source)


def _begin(source: Source, calls: Calls, tags: Tags, found: str) -> Reading[CallStart | None]:
    """The call, if a name follows what was found."""
    opening, closing = tags.name
    yield from skip_space(source)
    if found == tags.call[0] and opening and not (yield from accept(source, opening)):
        return None
    name = yield from word(source)
    if not name or (closing and not (yield from accept(source, closing))):
        return None
    return calls.begin(name)


def _arguments(source: Source, begun: CallStart, tags: Tags, schema: Mapping[str, Any]) -> Reading[bool]:
    """Take arguments and what ends a call. Returns False for what is none."""
    before = "{"
    while True:
        yield from skip_space(source)
        if not (yield from accept(source, tags.key[0])):
            break
        key = yield from through(source, tags.key[1], _LONGEST_NAME)
        if key is None:
            return False
        if tags.value[0]:
            yield from skip_space(source)
            if not (yield from accept(source, tags.value[0])):
                return False
        value = yield from through(source, tags.value[1], _LONGEST_VALUE)
        if value is None:
            return False
        name, wanted = _named(key.strip(), schema, tags)
        said = read_value(value, wanted, tags.on_lines)
        yield CallArguments(begun.index, f"{before}{json.dumps(name, ensure_ascii=False)}: {said}")
        before = ", "
    end = tags.end or tags.call[1]
    if not (yield from accept(source, end)):
        return False
    yield CallArguments(begun.index, "{}" if before == "{" else "}")
    return True


def _named(key: str, schema: Mapping[str, Any], tags: Tags) -> tuple[str, Any]:
    """The name of an argument, and the schema of its value. Where the tool's schema names no types, a call
    that says of a value whether it is a text is believed."""
    name, _, kind = key.partition(tags.is_text) if tags.is_text else (key, "", "")
    wanted = _of(schema, name)
    return name, {"type": "string"} if kind == "true" and not types_of(wanted) else wanted


def _of(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def read_value(value: str, schema: Any, on_lines: bool) -> str:
    """An argument in JSON: a text where its schema says so, or says nothing and it is no JSON. What nests
    deeper than calls may is a text, too."""
    text = value.removeprefix("\n").removesuffix("\n") if on_lines else value
    types = types_of(schema)
    if types != {"string"}:
        bare = text.strip()
        bare = _PYTHONS.get(bare, bare)
        try:
            parsed = json.loads(bare, parse_constant=_no_number)
        except (ValueError, RecursionError):
            pass
        else:
            if ("string" not in types or bare == "null") and not nests_deeper(parsed):
                return bare
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema names, also in alternatives; without any, all are possible. What is no
    JSON schema names none."""
    if not isinstance(schema, Mapping):
        return set()
    named, listed = schema.get("type"), schema.get("enum")
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else []:
            types |= types_of(one)
    if isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed):
        types.add("string")
    return types


def _no_number(name: str) -> None:
    """NaN and the infinities are no JSON."""
    raise ValueError(name)
