"""Grammars as clients write them: what reaches the workers, and where a wrong one is wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from router.text import grammars
from router.text.grammars import GrammarChecks, Wanted, choice_grammar, lark_grammar
from wire.grammars import LONGEST_GRAMMAR, grammar_problem
from wire.request import Grammar, GrammarKind


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks()
    yield made
    made.close()


def checked(checks: GrammarChecks, kind: GrammarKind, value: Any, param: str = "p") -> Grammar:
    grammar = asyncio.run(checks.checked(Wanted(param, kind, value)))
    assert grammar is not None
    return grammar


def refused(checks: GrammarChecks, kind: GrammarKind, value: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checked(checks, kind, value)
    assert caught.value.param == "p"
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "p: Invalid type: strin"),
        ({"properties": {"a": {"type": "strin"}}}, "p.properties.a: Invalid type: strin"),
        (
            {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"minLength": -1}]}}}},
            "p.properties.a.items.anyOf.1: Expected positive integer for 'minLength', got -1",
        ),
        (
            {"$defs": {"x": {"type": "string", "not": {}}}, "prefixItems": [{"$ref": "#/$defs/x"}]},
            'p.$defs.x: Unimplemented keys: ["not"]',
        ),
        ({"additionalProperties": {"$ref": "#/x"}}, "p.additionalProperties: Pointer '/x' does not exist"),
        (
            {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
            "p: Unsatisfiable schema: required property 'a' is unsatisfiable",
        ),
    ],
)
def test_a_wrong_schema_names_the_place(checks: GrammarChecks, schema: Any, message: str) -> None:
    assert refused(checks, GrammarKind.JSON_SCHEMA, schema) == message
    assert refused(checks, GrammarKind.JSON_SCHEMA, json.dumps(schema)) == message


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "not JSON"),
        (GrammarKind.JSON_SCHEMA, "[1]", "an object"),
        (GrammarKind.JSON_SCHEMA, '{"minimum": NaN}', "not JSON"),
        (GrammarKind.JSON_SCHEMA, {"description": "a" * LONGEST_GRAMMAR}, "more than"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 400 + "{}" + "}" * 400, "recursion"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 10_000 + "{}" + "}" * 10_000, "nested too deeply"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "http://127.0.0.1:1/x.json"}, "does not fetch"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "a(?=b)", "look-around"),
        (GrammarKind.REGEX, "a" * (LONGEST_GRAMMAR + 1), "more than"),
        (GrammarKind.LARK, "start: x", "unknown name"),
        (GrammarKind.LARK, 'x ::= "a"', "No 'root' rule"),
        (GrammarKind.LARK, "a" * (LONGEST_GRAMMAR + 1), "more than"),
        (GrammarKind.LARK, ["a" * LONGEST_GRAMMAR], "more than"),
        (GrammarKind.LARK, ["\ud800"], "hex escape"),
        (GrammarKind.LARK, 'start: "\ud800"', "surrogates"),
        (GrammarKind.REGEX, "\ud800", "surrogates"),
        (GrammarKind.JSON_SCHEMA, {"const": "\ud800"}, "surrogates"),
    ],
)
def test_what_is_wrong_is_said(checks: GrammarChecks, kind: GrammarKind, value: Any, words: str) -> None:
    assert words in refused(checks, kind, value)


def test_equal_schemas_have_equal_grammars(checks: GrammarChecks) -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "string"}}}
    one = checked(checks, GrammarKind.JSON_SCHEMA, schema)
    assert one == checked(checks, GrammarKind.JSON_SCHEMA, json.dumps(schema, indent=3))
    assert asyncio.run(checks.checked(None)) is None


def test_choices_are_no_grammar(checks: GrammarChecks) -> None:
    for choices in (["root ::= x", "b"], ["start: a"]):
        assert checked(checks, GrammarKind.LARK, choices).text == choice_grammar(choices)


def test_a_known_grammar_is_not_checked_again(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    checked(checks, GrammarKind.REGEX, "a+")
    monkeypatch.setattr(grammars, "grammar_problem", lambda _: "checked again")
    checked(checks, GrammarKind.REGEX, "a+")
    assert "checked again" in refused(checks, GrammarKind.REGEX, "b+")


def test_a_slow_check_blocks_nobody_and_ends(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(grammars, "grammar_problem", lambda _: "late" if released.wait(20.0) else "")
    monkeypatch.setattr(grammars, "_CHECK_S", 0.05)
    assert "make it smaller" in refused(checks, GrammarKind.REGEX, "a+")
    released.set()


@given(st.lists(st.text(max_size=20), min_size=1, max_size=8))
def test_any_texts_can_be_choices(choices: list[str]) -> None:
    assert grammar_problem(Grammar(GrammarKind.LARK, choice_grammar(choices))) == ""


def test_gbnf_becomes_lark_and_lark_stays() -> None:
    for text in ('root ::= "a" | "b" x\nx ::= [0-9]+', 'start: "a" | "b" X\nX: /[0-9]+/'):
        assert grammar_problem(Grammar(GrammarKind.LARK, lark_grammar(text, "ebnf"))) == ""


@pytest.mark.parametrize(
    "text", ['foo ::= "a"', 'root ::= "a" (', "root ::= " + "(" * 50_000, "x" * (1 << 16)]
)
def test_wrong_gbnf_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="ebnf") as caught:
        lark_grammar(text, "ebnf")
    assert caught.value.param == "ebnf"
