"""Grammars of calls with an argument a tag (xml.py): arguments in the order in which a schema has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.text.tool_formats.syntax import CalledTool, CallSyntax, Markers
from router.text.tool_formats.xml import GLM, QWEN, SEED, Tags, types_of

_KEPT = ("$defs", "definitions")
_OF_TEXTS = ("pattern", "minLength", "maxLength", "format")
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


@dataclass(frozen=True, slots=True)
class _Written:
    """What stands around an argument. `behind_value` begins with the tag that ends a text, or a line end."""

    tags: Tags
    before_key: tuple[str, ...]
    behind_key: tuple[str, ...]
    behind_value: tuple[str, ...]

    def arguments(self, tool: CalledTool, markers: Markers) -> str:
        """Those of a tool. Raises InvalidRequest for a strict schema that cannot be followed."""
        schema = tool.schema
        if tool.follows:
            _check(schema, _COMBINED, tool)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return "" if tool.follows else f"({self._argument(_ANY_KEY, 'value_text', markers)})*"
        required = schema.get("required") or ()
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
        named = [inner["const"]] if "const" in inner else inner.get("enum")
        if isinstance(named, list) and named and all(isinstance(one, str) for one in named):
            return f"({' | '.join(map(json.dumps, named))}) {end}"
        if "string" in types or not (types or "$ref" in inner):
            if tool.follows:
                _check(inner, _OF_TEXTS, tool)
            return "value_text"
        argument = CalledTool(tool.name, {**kept, **inner}, tool.follows)
        return f"{argument.rule()} {end}"


def _check(schema: Mapping[str, Any], keywords: tuple[str, ...], tool: CalledTool) -> None:
    for keyword in keywords:
        if keyword in schema:
            raise InvalidRequest(
                f"{tool.place}: {keyword!r} cannot be followed in the form in which this model writes calls",
                "tools",
            )


def _qwen_call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"{QWEN.name[0]}{name}{QWEN.name[1]}\n",), (f"{QWEN.end}\n",)


def _glm_call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"{name}\n",), ()


_QWEN = _Written(QWEN, (QWEN.key[0],), (">\n",), ("\n", QWEN.value[1], "\n"))
_SEED = _Written(SEED, (SEED.key[0],), (">",), (SEED.value[1], "\n"))
_GLM = _Written(GLM, (GLM.key[0],), (GLM.key[1], "\n", GLM.value[0]), (GLM.value[1], "\n"))


def _syntax(written: _Written, call: Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]]) -> CallSyntax:
    opening, closing = written.tags.call
    lines = ("\n",) if written.tags.name[0] else ()  # before the name
    between = (closing, "\n", opening, *lines)
    return CallSyntax(call, opening, lines, between, (closing,), written.arguments, written.rules)


QWEN_SYNTAX = _syntax(_QWEN, _qwen_call)
SEED_SYNTAX = _syntax(_SEED, _qwen_call)
GLM_SYNTAX = _syntax(_GLM, _glm_call)
