"""How calls are written, for grammars that demand them: in Lark, as llguidance reads it (wire/grammars.py).

What a token of its own stands for is that token there (`<[151657]>`), never its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.text.longest_text import NOTHING, any_of

_WHITE_SPACE = r"( |\n[ \t]{0,64})"  # as wire/grammars.py has it for schemas


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool that may be called. `follows`: its arguments follow its schema, else as far as possible."""

    name: str
    schema: dict[str, Any]
    follows: bool
    place: str = ""  # of its schema in the request

    def arguments(self) -> str:
        """Their rule, as one object."""
        return CalledTool(self.name, {"type": "object", **self.schema}, self.follows).rule()

    def rule(self) -> str:
        """That of the schema, as JSON."""
        return json_rule(self.schema, not self.follows)


def json_rule(schema: dict[str, Any], is_lenient: bool = False) -> str:
    """JSON that follows a schema; a lenient one as far as it can be followed."""
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": is_lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _as_json(tool: CalledTool, markers: Markers) -> str:  # noqa: ARG001
    return tool.arguments()


def _no_rules(markers: Markers) -> str:  # noqa: ARG001
    return ""


class Expression(str):
    """A regular expression in a list of texts."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One or more calls: `trigger`, `opening`, calls with `between`, `closing`. A part is a list of texts,
    each a token of its own or not, or an Expression. The trigger is what text before calls never has."""

    call: Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]]  # by its name: before and behind arguments
    trigger: str
    opening: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    arguments: Callable[[CalledTool, Markers], str] = _as_json  # in Lark
    rules: Callable[[Markers], str] = _no_rules  # that the arguments need


class Markers:
    """Texts as grammars have them."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: those that tokenizers take out of a text before all else, by their text."""
        self._tokens = tokens
        self._split = any_of(filter(None, tokens)) or NOTHING

    def pieces(self, text: str) -> list[str]:
        """The tokens in a text, and what stands between them, as tokenizers read it. Nothing is empty."""
        found, at = [], 0
        for match in self._split.finditer(text):
            found += [text[at : match.start()], match[0]]
            at = match.end()
        return [piece for piece in (*found, text[at:]) if piece]

    def is_token(self, text: str) -> bool:
        """Whether a text is a token of its own."""
        return text in self._tokens

    def lark(self, *texts: str) -> str:
        """The texts behind one another."""
        return " ".join(self._one(text) for text in texts if text)

    def _one(self, text: str) -> str:
        if isinstance(text, Expression):
            return f"/{text}/"
        token = self._tokens.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"
