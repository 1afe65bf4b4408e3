"""From what a client writes to a Grammar for the workers, checked: wrong ones are refused here, by place.

llguidance checks a grammar without a tokenizer. Most take a millisecond, some a second, so all are checked on
threads of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import any_to_lark

from common.errors import InvalidRequest
from wire.grammars import LONGEST_GRAMMAR, grammar_problem
from wire.request import Grammar, GrammarKind

_CHECK_S = 10.0
_PLACE_S = 0.5  # for finding where in a schema the problem is
_THREADS = 2
_KNOWN = 1024
_NEW_LINE = "\n"


class Wanted(NamedTuple):
    """A grammar as a request has it: `value` in the language `kind`, from the field `param`."""

    param: str
    kind: GrammarKind
    value: Any  # a schema: a dict or its JSON; a list of choices; else text
    is_ours: bool = False  # no client has written it
    around: str = ""  # Grammar.around
    parts: tuple[tuple[str, str], ...] = ()  # places in the request, and the rules made of them


class GrammarChecks:
    """Checks grammars on threads of its own, and remembers those that were right. Close it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-checks")
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def checked(self, wanted: Wanted | None) -> Grammar | None:
        """The grammar that a request wants. Raises InvalidRequest."""
        if wanted is None:
            return None
        source = _source(wanted)
        if len(source) + len(wanted.around) > LONGEST_GRAMMAR:
            problem = f"{wanted.param} has more than {LONGEST_GRAMMAR} characters"
            raise InvalidRequest(problem, wanted.param)
        try:
            key = hashlib.sha256(f"{wanted.kind} {source}\0{wanted.around}".encode()).digest()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{wanted.param} is no Unicode text: {error.reason}", wanted.param) from None
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        check = asyncio.get_running_loop().run_in_executor(self._threads, _checked, wanted, source)
        try:
            grammar = self._known[key] = await asyncio.wait_for(check, _CHECK_S)
        except TimeoutError:
            problem = f"{wanted.param} was not checked within {_CHECK_S:.0f} s: make it smaller"
            raise InvalidRequest(problem, wanted.param) from None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return grammar


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts, in Lark."""
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def lark_grammar(text: str, param: str) -> str:
    """A grammar in GBNF (`root ::= ...`) or Lark (`start: ...`), in Lark. Raises InvalidRequest."""
    try:
        lark: str = any_to_lark(text)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param) from None
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for a missing root
        raise InvalidRequest(f"{param}: {error}", param) from None
    return lark


def _source(wanted: Wanted) -> str:
    """The grammar as text. A schema is written anew, so that equal ones are compiled once."""
    value = wanted.value
    if isinstance(value, list):
        return choice_grammar(value)
    if wanted.kind is not GrammarKind.JSON_SCHEMA:
        return str(value)
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{wanted.param}: a JSON schema is an object", wanted.param)
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{wanted.param} is not JSON: {error}", wanted.param) from None
    except RecursionError:
        raise InvalidRequest(f"{wanted.param} is nested too deeply", wanted.param) from None


def _checked(wanted: Wanted, source: str) -> Grammar:
    """The grammar for the workers. Raises InvalidRequest that names the place."""
    is_written = wanted.kind is GrammarKind.LARK and not (isinstance(wanted.value, list) or wanted.is_ours)
    text = lark_grammar(source, wanted.param) if is_written else source
    grammar = Grammar(wanted.kind, text, wanted.around)
    problem = grammar_problem(grammar)
    if not problem:
        return grammar
    for place, rule in wanted.parts:
        if of_part := grammar_problem(Grammar(GrammarKind.LARK, f"start: {rule}")):
            raise InvalidRequest(f"{place}: {of_part.partition(_NEW_LINE)[0]}", place.partition(".")[0])
    where = wanted.param
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        where += "".join(f".{step}" for step in _place(json.loads(grammar.text), problem))
    raise InvalidRequest(f"{where}: {problem}", wanted.param)


def _place(schema: dict[str, Any], problem: str) -> list[str]:
    """The path to the innermost part of a schema that has this problem by itself."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    until = time.monotonic() + _PLACE_S
    path: list[str] = []
    part: dict[str, Any] | None = schema
    while part is not None:
        schema, part = part, None
        for step, child in _children(schema):
            if time.monotonic() >= until:
                break
            text = json.dumps({**shared, **child})
            if grammar_problem(Grammar(GrammarKind.JSON_SCHEMA, text)) == problem:
                path.append(step)
                part = child
                break
    return path


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, by their path."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        for name, child in inner.items() if isinstance(inner, dict) else ():
            if isinstance(child, dict):
                yield f"{key}.{name}", child
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        for index, child in enumerate(inner) if isinstance(inner, list) else ():
            if isinstance(child, dict):
                yield f"{key}.{index}", child
    for key in ("items", "additionalProperties", "additionalItems"):
        child = schema.get(key)
        if isinstance(child, dict):
            yield key, child
