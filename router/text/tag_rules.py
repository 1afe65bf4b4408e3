"""Rules of grammars in which free text and what has to match follow one another: in Lark, for llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.text.tool_formats.syntax import Markers, json_rule
from wire.grammars import LONGEST_GRAMMAR

_ANY = r"/(.|\n)*/"


class TagRules:
    """Collects the rules that a grammar needs, and the places in the request that they are made of."""

    def __init__(self, markers: Markers, param: str) -> None:
        """`param` is the field that asks for the grammar. Methods raise InvalidRequest when it grows too
        long: each text may stand in it many times."""
        self.markers = markers
        self._param = param
        self._size = 0  # characters
        self.parts: list[tuple[str, str]] = []  # Wanted.parts
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules, by what they are

    def grammar(self, start: str) -> str:
        """The whole, by what it begins with."""
        return "\n".join((f"start: {start}", *self._rules)) + "\n"

    def schema(self, schema: dict[str, Any], place: str) -> str:
        """JSON that follows a schema."""
        return self._part(json_rule(schema), place)

    def regex(self, pattern: str, place: str) -> str:
        """What an expression matches."""
        escaped = pattern.replace("/", r"\/")
        return self._part(f"/{escaped}/", place)

    def lark(self, grammar: str, place: str) -> str:
        """What a grammar in Lark matches."""
        return self._part(f"%lark {{\n{grammar}\n}}", place)

    def literal(self, text: str) -> str:
        """A text, in which added tokens stand for themselves. "" for an empty one."""
        return self._counted(self.markers.lark(*self.markers.pieces(text)))

    def text(self, without: Sequence[str] = ()) -> str:
        """Any text, that has none of these in it."""
        return self._counted(self._named("TEXT", "", self._any(without)))

    def until(self, end: Sequence[str], without: Sequence[str] = ()) -> str:
        """Any text up to the first place where `end` stands, and that. `end`: pieces (Markers.pieces)."""
        first, *rest = end
        before = self.text(without)
        if self.markers.is_token(first):
            return self._counted(f"{before} {self.markers.lark(*end)}")
        if not rest:
            return self._named("until", "[lazy]", f"{before} {self.markers.lark(first)}")
        # A token ends the text, which has to end with `first` there.
        head = self._named("UNTIL", "", f"{before} {self.markers.lark(first)}")
        return self._counted(f"{head} {self.markers.lark(*rest)}")

    def _any(self, without: Sequence[str]) -> str:
        if not without:
            return _ANY
        return f"{_ANY} & ~({_ANY} ({' | '.join(map(json.dumps, without))}) {_ANY})"

    def _named(self, prefix: str, attribute: str, body: str) -> str:
        """The name of the rule for this body. Equal ones are one rule, as the lexer wants it."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"{prefix}_{len(self._names)}"
            self._rules.append(self._counted(f"{name}{attribute}: {body}"))
        return name

    def _part(self, rule: str, place: str) -> str:
        self.parts.append((place, rule))
        return self._counted(rule)

    def _counted(self, rule: str) -> str:
        self._size += len(rule) + 1
        if self._size > LONGEST_GRAMMAR:
            problem = f"{self._param}: its grammar has more than {LONGEST_GRAMMAR} characters"
            raise InvalidRequest(problem, self._param)
        return rule
