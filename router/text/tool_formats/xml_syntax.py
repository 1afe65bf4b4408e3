"""Grammars of calls with an argument a tag (xml.py): arguments in the order in which a schema has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from common.errors import InvalidRequest
from router.text.tool_formats.syntax import CalledTool, CallSyntax, Markers
from router.text.tool_formats.xml import GLM, MINIMAX, QWEN, SEED, Tags, read_value, types_of

_KEPT = ("$defs", "definitions")
OF_TEXTS = ("pattern", "minLength", "maxLength", "format", "enum", "const", "allOf", "$ref", "not")
ALTERNATIVES = ("anyOf", "oneOf")
_OF_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


@dataclass(frozen=True, slots=True)
class _Written:
    """What stands around an argument. `behind_value` begins with the tag that ends a text, or a line end."""

    tags: Tags
    before_key: tuple[str, ...]
    behind_key: tuple[str, ...]
    behind_value: tuple[str, ...]

    def arguments(self, tool: CalledTool, markers: Markers) -> str:
        """Those of a tool. Raises InvalidRequest for a strict schema that cannot be followed, and for
        `required` that is no list."""
        schema = tool.schema
        check_followed(schema, _COMBINED, tool)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return "" if tool.follows else f"({self._argument(ANY_KEY, 'value_text', markers)})*"
        required = schema.get("required") or []
        if not isinstance(required, list):
            raise InvalidRequest(f"{tool.place}: 'required' is a list of names", "tools")
        kept = {key: schema[key] for key in _KEPT if key in schema}
        written = []
        for key, inner in properties.items():
            value = self._value(inner, kept, tool, markers)
            one = self._argument(markers.lark(key), value, markers)
            written.append(f"({one}){'' if key in required else '?'}")
        return " ".join(written)

    def rules(self, markers: Markers) -> str:
        """The rule of texts, which end with their tag."""
        if markers.is_token(self.tags.value[1]):
            return f"value_text: TEXT {markers.lark(*self.behind_value)}\n"
        return f"value_text[lazy]: TEXT {json.dumps(''.join(self.behind_value))}\n"

    def _argument(self, key: str, value: str, markers: Markers) -> str:
        return f"{markers.lark(*self.before_key)} {key} {markers.lark(*self.behind_key)} {value}"

    def _value(self, schema: Any, kept: dict[str, Any], tool: CalledTool, markers: Markers) -> str:
        inner: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        types, end = types_of(inner), markers.lark(*self.behind_value)
        listed = [self._text(value, inner) for value in listed_values(inner) or ()]
        if texts := [text for text in listed if text is not None]:
            return f"({' | '.join(map(json.dumps, texts))}) {end}"
        if "string" in types or inner.keys() <= _OF_NOTHING:
            if tool.follows and (limit := _limit_of_texts(inner)):
                refuse(limit, tool)
            return "value_text"
        argument = CalledTool(tool.name, {**kept, **inner}, tool.follows)
        return f"{argument.rule()} {end}"

    def _text(self, value: Any, schema: Mapping[str, Any]) -> str | None:
        """What is written for a value so that it is read as that value; None: nothing is."""
        before = "\n" if self.behind_key[-1].endswith("\n") else ""
        after = "\n" if self.behind_value[0] == "\n" else ""
        written = json.dumps(value, ensure_ascii=False)
        for text in (value, written) if isinstance(value, str) else (written,):
            read = read_value(before + text + after, schema, self.tags.on_lines)
            if json.dumps(json.loads(read), ensure_ascii=False) == written and self.tags.value[1] not in text:
                return text
        return None


def listed_values(schema: Any) -> list[Any] | None:
    """The values of a schema that lists all of them, also in alternatives; None: it does not."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    for name in ALTERNATIVES:
        if isinstance(schema.get(name), list):
            inner = [listed_values(one) for one in schema[name]]
            return None if None in inner else [value for one in inner for value in one or ()]
    return [None] if schema.get("type") == "null" else None


def _limit_of_texts(schema: Any) -> str:
    """A keyword that limits the texts which a schema takes; "": it takes any text."""
    if not isinstance(schema, Mapping):
        return ""
    for keyword in OF_TEXTS:
        if keyword in schema:
            return keyword
    for name in ALTERNATIVES:
        alternatives = schema[name] if isinstance(schema.get(name), list) else []
        limits = [_limit_of_texts(one) for one in alternatives if "string" in (types_of(one) or {"string"})]
        if limits and all(limits):
            return limits[0]
    return ""


def check_followed(schema: Mapping[str, Any], keywords: tuple[str, ...], tool: CalledTool) -> None:
    """Raises InvalidRequest if a strict tool's schema has one of these keywords."""
    for keyword in keywords:
        if tool.follows and keyword in schema:
            refuse(keyword, tool)


def refuse(keyword: str, tool: CalledTool) -> None:
    """Raises InvalidRequest for a keyword of a tool's schema."""
    raise InvalidRequest(
        f"{tool.place}: {keyword!r} cannot be followed in the form in which this model writes calls", "tools"
    )


def _named_call(tags: Tags, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"{tags.name[0]}{name}{tags.name[1]}\n",), (f"{tags.end}\n",)


def _glm_call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"{name}\n",), ()


_QWEN = _Written(QWEN, (QWEN.key[0],), (">\n",), ("\n", QWEN.value[1], "\n"))
_SEED = _Written(SEED, (SEED.key[0],), (">",), (SEED.value[1], "\n"))
_MINIMAX = _Written(MINIMAX, (MINIMAX.key[0],), (MINIMAX.key[1],), (MINIMAX.value[1], "\n"))
_GLM = _Written(GLM, (GLM.key[0],), (GLM.key[1], "\n", GLM.value[0]), (GLM.value[1], "\n"))


def _syntax(written: _Written, call: Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]]) -> CallSyntax:
    opening, closing = written.tags.call
    lines = ("\n",) if written.tags.name[0] else ()  # before the name
    between = (closing, "\n", opening, *lines)
    return CallSyntax(call, opening, lines, between, (closing,), written.arguments, written.rules)


QWEN_SYNTAX = _syntax(_QWEN, partial(_named_call, QWEN))
SEED_SYNTAX = _syntax(_SEED, partial(_named_call, SEED))
# All calls stand between one pair of tags.
MINIMAX_SYNTAX = replace(_syntax(_MINIMAX, partial(_named_call, MINIMAX)), between=())
GLM_SYNTAX = _syntax(_GLM, _glm_call)
