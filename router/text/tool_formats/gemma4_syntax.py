"""Grammars of Gemma 4's calls (gemma4.py): arguments in the order in which a schema has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.errors import InvalidRequest
from router.text.json_scanner import DEEPEST
from router.text.tool_formats.gemma4 import BEFORE_NAME, CLOSE, OPEN, QUOTE
from router.text.tool_formats.syntax import CalledTool, CallSyntax, Markers
from router.text.tool_formats.xml import types_of
from router.text.tool_formats.xml_syntax import (
    ALTERNATIVES,
    ANY_KEY,
    OF_TEXTS,
    check_followed,
    listed_values,
    refuse,
)

_TYPES = ("string", "object", "array", "number", "integer", "boolean", "null")
_OF_OBJECTS = ("patternProperties", "minProperties", "propertyNames", "dependentRequired")
_OF_ARRAYS = ("minItems", "maxItems", "uniqueItems", "contains", "prefixItems")
_OF_ALL = ("allOf", "$ref", "not", "if")


def _arguments(tool: CalledTool, markers: Markers) -> str:
    """Those of a tool. Raises InvalidRequest for a strict schema that cannot be followed, and for `required`
    that is no list."""
    if tool.schema.get("type", "object") != "object" and tool.follows:
        refuse("type", tool)
    return _Values(tool, markers).of_object(tool.schema, 1)


class _Values:
    """The values of one tool's schemas."""

    def __init__(self, tool: CalledTool, markers: Markers) -> None:
        self._tool = tool
        self._markers = markers

    def of(self, schema: Any, level: int) -> str:
        """What a schema takes, in Lark; any value where it says nothing, or what cannot be followed."""
        if not isinstance(schema, Mapping):
            return "value"
        check_followed(schema, _OF_ALL, self._tool)
        if (values := listed_values(schema)) is not None:
            return f"({' | '.join(self._written(value) for value in values)})" if values else "value"
        for name in ALTERNATIVES:
            if isinstance(schema.get(name), list) and schema[name]:
                return f"({' | '.join(self.of(one, level) for one in schema[name])})"
        types = types_of(schema) or {name for name, words in _IMPLIED.items() if words & schema.keys()}
        found = [self._of_type(schema, one, level) for one in _TYPES if one in types]
        return f"({' | '.join(found)})" if found else "value"

    def of_object(self, schema: Mapping[str, Any], level: int) -> str:
        """An object: what `properties` names, in that order, without what is not required or with it."""
        check_followed(schema, (*_OF_OBJECTS, *_OF_ALL, *ALTERNATIVES), self._tool)
        properties, required = schema.get("properties"), schema.get("required") or []
        if not isinstance(required, list):
            raise InvalidRequest(f"{self._tool.place}: 'required' is a list of names", "tools")
        if not isinstance(properties, Mapping) or level > DEEPEST:
            return '"{}"' if self._tool.follows and level == 1 else "object"
        most = schema.get("maxProperties")
        if isinstance(most, int) and most < len(properties):
            check_followed(schema, ("maxProperties",), self._tool)
        members = [
            (f'{self._markers.lark(key)} ":" {self.of(inner, level + 1)}', key in required)
            for key, inner in properties.items()
        ]
        return f'"{{" {_members(members)} "}}"'

    def _of_type(self, schema: Mapping[str, Any], kind: str, level: int) -> str:
        match kind:
            case "string":
                check_followed(schema, OF_TEXTS, self._tool)
                return "text"
            case "object":
                return self.of_object(schema, level)
            case "array":
                check_followed(schema, _OF_ARRAYS, self._tool)
                item = self.of(schema.get("items"), level + 1)
                return f'"[" ({item} ("," {item})*)? "]"'
            case _:
                return replace(self._tool, schema={**schema, "type": kind}).rule()

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return self._markers.lark(QUOTE, value, QUOTE)
        if isinstance(value, dict | list):
            return "value"
        return json.dumps(json.dumps(value))


_IMPLIED = {"object": {"properties"}, "array": {"items"}}
"""Keywords that say of what type a value is where `type` is missing."""


def _members(members: list[tuple[str, bool]]) -> str:
    """Members with commas between them, of which some (False) may be missing."""
    if not members:
        return ""
    first = next((i for i, (_, is_required) in enumerate(members) if is_required), None)
    if first is None:
        return f"({' | '.join(_from(members, i) for i in range(len(members)))})?"
    before = " ".join(f'({member} ",")?' for member, _ in members[:first])
    return f"{before} {_from(members, first)}"


def _from(members: list[tuple[str, bool]], first: int) -> str:
    """That member, and those behind it."""
    rest = (f'("," {member}){"" if is_required else "?"}' for member, is_required in members[first + 1 :])
    return " ".join((members[first][0], *rest))


def _rules(markers: Markers) -> str:
    """Of any text, and of any value."""
    if markers.is_token(QUOTE):
        text = f"text: {markers.lark(QUOTE)} TEXT {markers.lark(QUOTE)}\n"
    else:
        text = f"text: {json.dumps(QUOTE)} behind_text\nbehind_text[lazy]: TEXT {json.dumps(QUOTE)}\n"
    return (
        f"{text}"
        'value: text | object | array | %json {"type": ["number", "boolean", "null"]}\n'
        f'member: {ANY_KEY} ":" value\n'
        'object: "{" (member ("," member)*)? "}"\n'
        'array: "[" (value ("," value)*)? "]"\n'
    )


def _call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"{BEFORE_NAME}{name}",), ()


SYNTAX = CallSyntax(
    _call, trigger=OPEN, between=(CLOSE, OPEN), closing=(CLOSE,), arguments=_arguments, rules=_rules
)
