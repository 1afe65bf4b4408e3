"""The fields that ask for structured output: OpenAI's, vLLM's and SGLang's. A request has one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common.errors import InvalidRequest
from router.api.structural_tags import AnyFormat, StructuralTag, Structures, Triggers
from router.text.grammars import Wanted
from router.text.tool_formats.syntax import Markers
from wire.grammars import LONGEST_GRAMMAR
from wire.request import GrammarKind

_MOST_CHOICES = 4096
_ANY_OBJECT = {"type": "object"}


def _from_json(value: object) -> object:
    """What a text of JSON says. Raises ValueError."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


GrammarText = Annotated[str, Field(max_length=LONGEST_GRAMMAR)]
Schema = dict[str, Any] | GrammarText
TagField = Annotated[StructuralTag, BeforeValidator(_from_json)]  # also as JSON
Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=_MOST_CHOICES, fail_fast=True)]


class JsonSchema(BaseModel):
    """`json_schema` of OpenAI's response_format."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # None: any object
    strict: bool | None = None  # it is followed in either case


class ResponseFormat(BaseModel):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: AnyFormat | None = None
    structures: Structures | None = None
    triggers: Triggers | None = None

    def wanted(self, markers: Markers) -> Wanted | None:
        """Raises InvalidRequest for fields of another type, and for those that are missing."""
        if self.type == "structural_tag" and self.json_schema is None:
            tag = StructuralTag(format=self.format, structures=self.structures, triggers=self.triggers)
            return tag.wanted("response_format", markers)
        if (self.format, self.structures, self.triggers) != (None, None, None):
            raise InvalidRequest(
                "format, structures and triggers belong to type 'structural_tag'", "response_format"
            )
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format.json_schema belongs to type 'json_schema'", "response_format.json_schema"
            )
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return Wanted("response_format", GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
        schema = self.json_schema.schema_
        return Wanted("response_format.json_schema.schema", GrammarKind.JSON_SCHEMA, schema)


class StructuredOutputs(BaseModel):
    """vLLM's structured_outputs. One of the fields is given."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    structural_tag: TagField | None = None


class StructureFields(BaseModel):
    """What an output must match as a whole."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: Schema | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    structural_tag: TagField | None = None

    def wanted_grammar(self, markers: Markers) -> Wanted | None:
        """The grammar that is asked for. `markers` are the model's. Raises InvalidRequest for more than
        one."""
        found = list(self._all(markers))
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise InvalidRequest(f"{second} cannot be given together with {first}", second.partition(".")[0])
        return found[0] if found else None

    def _all(self, markers: Markers) -> Iterator[Wanted]:
        given = self.structured_outputs or _NONE
        form = self.response_format
        if form is not None and (wanted := form.wanted(markers)) is not None:
            yield wanted
        for param, tag in (
            ("structured_outputs.structural_tag", given.structural_tag),
            ("structural_tag", self.structural_tag),
        ):
            if tag is not None:
                yield tag.wanted(param, markers)
        if given.json_object:
            yield Wanted("structured_outputs.json_object", GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
        for param, schema in (
            ("structured_outputs.json", given.json_),
            ("guided_json", self.guided_json),
            ("json_schema", self.json_schema),
        ):
            if schema is not None:
                yield Wanted(param, GrammarKind.JSON_SCHEMA, schema)
        for param, regex in (
            ("structured_outputs.regex", given.regex),
            ("guided_regex", self.guided_regex),
            ("regex", self.regex),
        ):
            if regex is not None:
                yield Wanted(param, GrammarKind.REGEX, regex)
        for param, choices in (
            ("structured_outputs.choice", given.choice),
            ("guided_choice", self.guided_choice),
        ):
            if choices is not None:
                yield Wanted(param, GrammarKind.LARK, choices)
        for param, grammar in (
            ("structured_outputs.grammar", given.grammar),
            ("guided_grammar", self.guided_grammar),
            ("ebnf", self.ebnf),
        ):
            if grammar is not None:
                yield Wanted(param, GrammarKind.LARK, grammar)


_NONE = StructuredOutputs()
