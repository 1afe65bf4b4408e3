"""Structural tags: free text and what has to match, one behind the other.

The formats are those of XGrammar's structural tags, and the older `structures` with `triggers`, as vLLM and
SGLang take them. Each makes its part of a grammar.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from router.text.grammars import Wanted, lark_grammar
from router.text.tag_rules import TagRules
from router.text.tool_formats.syntax import Markers
from wire.grammars import LONGEST_GRAMMAR
from wire.request import GrammarKind

_MOST = 1024
Text = Annotated[str, Field(max_length=LONGEST_GRAMMAR)]
Texts = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=_MOST, fail_fast=True)]
Ends = tuple[str, ...] | None
"""What follows a part: one of these texts. (): the output's end. None: something that does not show where the
part ends, so that free text cannot stand there."""


class TagPart(BaseModel, ABC):
    """A part of an output."""

    model_config = ConfigDict(extra="forbid")

    @abstractmethod
    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        """The part and what follows it, in Lark. `place` is the part's in the request.

        Raises InvalidRequest.
        """


class ConstStringFormat(TagPart):
    """One text."""

    type: Literal["const_string"]
    value: Text

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:  # noqa: ARG002
        return f"{rules.literal(self.value)} {_one_of(rules, ends)}"


class JsonSchemaFormat(TagPart):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        return f"{rules.schema(self.json_schema, f'{place}.json_schema')} {_one_of(rules, ends)}"


class RegexFormat(TagPart):
    """What an expression matches."""

    type: Literal["regex"]
    pattern: Text

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        return f"{rules.regex(self.pattern, f'{place}.pattern')} {_one_of(rules, ends)}"


class GrammarFormat(TagPart):
    """What a grammar in GBNF or Lark matches."""

    type: Literal["grammar"]
    grammar: Text

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        written = f"{place}.grammar"
        return f"{rules.lark(lark_grammar(self.grammar, written), written)} {_one_of(rules, ends)}"


class AnyTextFormat(TagPart):
    """Free text, up to what follows it. `excludes`: what it does not have in it."""

    type: Literal["any_text"]
    excludes: Texts = []

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        if ends is None:
            raise InvalidRequest(
                f"{place}: free text stands last, or in a tag with an end: else nothing shows where it ends",
                place,
            )
        if not ends:
            return rules.text(self.excludes)
        return _either(rules.until(rules.markers.pieces(end), self.excludes) for end in ends)


class SequenceFormat(TagPart):
    """Parts behind one another."""

    type: Literal["sequence"]
    elements: Annotated[list[AnyFormat], Field(min_length=1, max_length=_MOST, fail_fast=True)]

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        last = len(self.elements) - 1
        return " ".join(
            one.rule(rules, f"{place}.elements.{index}", ends if index == last else None)
            for index, one in enumerate(self.elements)
        )


class OrFormat(TagPart):
    """One of several parts."""

    type: Literal["or"]
    elements: Annotated[list[AnyFormat], Field(min_length=1, max_length=_MOST, fail_fast=True)]

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        return _either(
            one.rule(rules, f"{place}.elements.{index}", ends) for index, one in enumerate(self.elements)
        )


class TagFormat(TagPart):
    """A part between two texts. `end`: one of them, or several of which one stands there."""

    type: Literal["tag"] = "tag"
    begin: Text
    content: AnyFormat
    end: Text | Annotated[Texts, Field(min_length=1)]

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        return f"{rules.literal(self.begin)} {self.behind_begin(rules, place, ends)}"

    def behind_begin(self, rules: TagRules, place: str, ends: Ends) -> str:
        """The rule of what follows `begin`."""
        own = tuple(self.end) if isinstance(self.end, list) else (self.end,) * bool(self.end)
        content = self.content.rule(rules, f"{place}.content", own or ends)
        return f"{content} {_one_of(rules, ends)}" if own else content


Tags = Annotated[list[TagFormat], Field(min_length=1, max_length=_MOST, fail_fast=True)]


class TriggeredTagsFormat(TagPart):
    """Free text with tags in it. Where a trigger stands, one of the tags that begin with it has to follow."""

    type: Literal["triggered_tags"]
    triggers: Annotated[Texts, Field(min_length=1)]
    tags: Tags
    at_least_one: bool = False  # then the output begins with it
    stop_after_first: bool = False
    excludes: Texts = []

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        rest = AnyTextFormat(type="any_text", excludes=self.excludes)
        tag = self._triggered(rules, place)
        first = _either(_rules(self.tags, rules, place)) if self.at_least_one else ""
        if not self.stop_after_first:
            return f"{first} ({tag})* {rest.rule(rules, place, ends)}"
        if self.at_least_one:
            return f"{first} {_one_of(rules, ends)}"
        found = f"{tag} {_one_of(rules, ends)}"
        return found if ends is None else _either((found, rest.rule(rules, place, ends)))

    def _triggered(self, rules: TagRules, place: str) -> str:
        """Free text up to a trigger, and the rest of a tag."""
        behind: dict[tuple[str, ...], list[str]] = {}
        for index, tag in enumerate(self.tags):
            where = f"{place}.tags.{index}"
            trigger, rest = self._divided(rules.markers, tag.begin, where)
            written = f"{rules.markers.lark(*rest)} {tag.behind_begin(rules, where, None)}"
            behind.setdefault(trigger, []).append(written)
        return _either(
            f"{rules.until(trigger, self.excludes)} {_either(written)}" for trigger, written in behind.items()
        )

    def _divided(self, markers: Markers, begin: str, where: str) -> tuple[tuple[str, ...], list[str]]:
        """The pieces of a tag's beginning up to the end of its trigger, and those behind it. A token in
        which the trigger ends is all part of it: it comes as a whole."""
        left = next((len(trigger) for trigger in self.triggers if begin.startswith(trigger)), None)
        if left is None:
            raise InvalidRequest(f"{where}.begin starts with none of the triggers", f"{where}.begin")
        pieces = markers.pieces(begin)
        trigger: list[str] = []
        while left > 0:
            piece = pieces.pop(0)
            if len(piece) > left and not markers.is_token(piece):
                pieces.insert(0, piece[left:])
                piece = piece[:left]
            trigger.append(piece)
            left -= len(piece)
        return tuple(trigger), pieces


class TagsWithSeparatorFormat(TagPart):
    """Tags and nothing else, with a text between each two."""

    type: Literal["tags_with_separator"]
    tags: Tags
    separator: Text
    at_least_one: bool = False
    stop_after_first: bool = False

    def rule(self, rules: TagRules, place: str, ends: Ends) -> str:
        tag = _either(_rules(self.tags, rules, place))
        more = "" if self.stop_after_first else f"({rules.literal(self.separator)} {tag})*"
        whole = f"{tag} {more}" if self.at_least_one else f"({tag} {more})?"
        return f"{whole} {_one_of(rules, ends)}"


AnyFormat = Annotated[
    ConstStringFormat
    | JsonSchemaFormat
    | RegexFormat
    | GrammarFormat
    | AnyTextFormat
    | SequenceFormat
    | OrFormat
    | TagFormat
    | TriggeredTagsFormat
    | TagsWithSeparatorFormat,
    Field(discriminator="type"),
]


class Structure(BaseModel):
    """A tag of the older form: JSON between two texts."""

    model_config = ConfigDict(extra="forbid")

    begin: Text
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # None: any JSON
    end: Text


Structures = Annotated[list[Structure], Field(max_length=_MOST, fail_fast=True)]
Triggers = Texts


class StructuralTag(BaseModel):
    """The whole: `format`, or `structures` and `triggers`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["structural_tag"] = "structural_tag"
    format: AnyFormat | None = None
    structures: Structures | None = None
    triggers: Triggers | None = None

    def wanted(self, param: str, markers: Markers) -> Wanted:
        """The grammar. `param` is the field that has the tags. Raises InvalidRequest."""
        rules = TagRules(markers, param)
        start = self._format(param).rule(rules, f"{param}.format" if self.format else param, ())
        return Wanted(param, GrammarKind.LARK, rules.grammar(start), is_ours=True, parts=tuple(rules.parts))

    def _format(self, param: str) -> TagPart:
        if self.format is not None and self.structures is None and self.triggers is None:
            return self.format
        if self.format is not None or not self.structures or not self.triggers:
            problem = f"{param}: a structural tag has either a format, or structures and triggers"
            raise InvalidRequest(problem, param)
        tags = [
            TagFormat(
                begin=one.begin,
                content=JsonSchemaFormat(type="json_schema", json_schema=one.schema_ or {}),
                end=one.end,
            )
            for one in self.structures
        ]
        return TriggeredTagsFormat(type="triggered_tags", triggers=self.triggers, tags=tags)


def _rules(tags: list[TagFormat], rules: TagRules, place: str) -> list[str]:
    return [tag.rule(rules, f"{place}.tags.{index}", None) for index, tag in enumerate(tags)]


def _one_of(rules: TagRules, ends: Ends) -> str:
    return _either(rules.literal(end) for end in ends) if ends else ""


def _either(alternatives: Iterable[str]) -> str:
    return f"({' | '.join(alternatives)})"
