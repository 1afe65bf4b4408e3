"""What the formats have in common: the numbers and ids of calls, and calls that are written as JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from router.text.json_scanner import JsonScanner, nests_deeper
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content
from router.text.output_source import Reading, Source, accept, skip_space, until

Schemas = Mapping[str, Mapping[str, Any]]
"""By the names of functions."""

_ARGUMENTS = ("arguments", "parameters")
_ID_CHARACTERS = 24
_SHORT = 9
_HALF = re.compile("[\ud800-\udfff]")


class Calls:
    """The calls of one choice: their numbers and ids."""

    def __init__(self, room: int, tools: Schemas, short_ids: bool = False) -> None:
        """`room` is the choice's, from which ids are made: they are the same when an output is read again.
        `tools`: the schemas of what the request's tools take. `short_ids`: of 9 characters, which Mistral's
        templates ask for."""
        self.tools = tools
        self._room = room
        self._short = short_ids
        self._count = 0
        self._own_ids: set[str] = set()

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of what a tool takes; empty for an unknown one."""
        return self.tools.get(name, {})

    def begin(self, name: str, own_id: str = "") -> CallStart:
        """The next call. `own_id`: the one that the model gave it, unless another call has it."""
        index, self._count = self._count, self._count + 1
        if own_id and own_id not in self._own_ids:
            self._own_ids.add(own_id)
            return CallStart(index, own_id, name)
        digest = hashlib.sha256(f"{self._room}.{index}".encode()).hexdigest()
        return CallStart(index, digest[:_SHORT] if self._short else f"call_{digest[:_ID_CHARACTERS]}", name)


def json_call(source: Source, calls: Calls, only_known: bool = False) -> Reading[bool]:
    """A call as an object with `name` and `arguments`, or `parameters`. Returns whether it was one.

    What is none is content from where `source.record` was called. `only_known`: a name that is none of the
    request's tools makes no call, in formats without markers.
    """
    begun: CallStart | None = None
    name: str | None = None
    arguments: str | None = None
    more = yield from _enter(source)
    while more:
        key = yield from _key(source)
        if key is None:
            break
        is_arguments = key in _ARGUMENTS and arguments is None
        if is_arguments and name is not None and (yield from skip_space(source)) == "{":
            begun = calls.begin(name)
            yield begun
            if not (yield from streamed_arguments(source, begun.index)):
                break
            arguments = ""  # they are said
        else:
            value = yield from json_value(source)
            if value is None:
                break
            if is_arguments:
                arguments = value
            elif key == "name":
                name = _text(value)
                if name is None or (only_known and name not in calls.tools):
                    break
        more = yield from _further(source)
        if more is None:
            break
    else:
        if more is False and begun is not None:
            return True
        if more is False and name is not None and (said := _object(arguments)) is not None:
            begun = calls.begin(name)
            yield begun
            yield CallArguments(begun.index, said)
            return True
    yield Content(source.recorded) if begun is None else CallBroken(begun.index, source.recorded)
    return False


def named_call(source: Source, calls: Calls, name: str, own_id: str = "") -> Reading[bool]:
    """The arguments of a call whose name was read, and maybe an id. Returns whether it was a call; what is
    none is content, as for `json_call`."""
    if not name or (yield from skip_space(source)) != "{":
        yield Content(source.recorded)
        return False
    begun = calls.begin(name, own_id)
    yield begun
    if (yield from streamed_arguments(source, begun.index)):
        return True
    yield CallBroken(begun.index, source.recorded)
    return False


@dataclass(frozen=True, slots=True)
class CallTokens:
    """What stands around all calls of an answer, and around each."""

    begin: str
    end: str
    call: str
    call_end: str


def read_between(source: Source, tokens: CallTokens, one: Callable[[Source], Reading[bool]]) -> Reading[None]:
    """Content and calls between tokens, of which all but the one that begins a call may be missing. `one`
    reads what follows that token, and returns whether it was a call; what is none it yields as content."""
    while True:
        space, found = yield from until(source, (tokens.begin, tokens.call), Content)
        if not found:
            return
        source.record(space + found)
        if found == tokens.begin:
            yield from skip_space(source)
            if not (yield from accept(source, tokens.call)):
                yield Content(source.recorded)
                continue
        if (yield from one(source)):
            for token in (tokens.call_end, tokens.end):
                yield from skip_space(source)
                yield from accept(source, token)
            yield from skip_space(source)


def streamed_arguments(source: Source, index: int) -> Reading[bool]:
    """Take a JSON object as a call's arguments while it comes. Returns False for what is none."""
    scanner = JsonScanner()
    while True:
        count, valid = scanner.take(source.text)
        source.take(count)
        if valid:
            yield CallArguments(index, valid)
        if scanner.done:
            return True
        if scanner.broken or source.ended:
            return False
        yield None


def json_value(source: Source) -> Generator[None, None, str | None]:
    """Take a whole JSON value. Returns None for what is none."""
    scanner, valid = JsonScanner(), ""
    while True:
        count, more = scanner.take(source.text)
        source.take(count)
        valid += more
        if scanner.done:
            return valid.strip()
        if scanner.broken or source.ended:
            return None
        yield None


def _enter(source: Source) -> Reading[bool | None]:
    """Whether an object begins that is not empty; False: it is empty, None: there is none."""
    if (yield from skip_space(source)) != "{":
        return None
    source.take(1)
    if (yield from skip_space(source)) != "}":
        return True
    source.take(1)
    return False


def _further(source: Source) -> Reading[bool | None]:
    """Whether a key follows; False: the object ends; None: neither."""
    char = yield from skip_space(source)
    if char == "" or char not in ",}":
        return None
    source.take(1)
    return char == ","


def _key(source: Source) -> Reading[str | None]:
    """Take a key and its colon."""
    if (yield from skip_space(source)) != '"':
        return None
    key = yield from json_value(source)
    if key is None or (yield from skip_space(source)) != ":":
        return None
    source.take(1)
    return _text(key)


def _text(value: str) -> str | None:
    """A JSON text that is not empty. None also for one with half a character, which no UTF-8 has."""
    decoded = json.loads(value)
    return decoded if isinstance(decoded, str) and decoded and not _HALF.search(decoded) else None


def _object(value: str | None) -> str | None:
    """Arguments that are an object, the text of one, or nothing; None: others."""
    if value is None or value in ("null", '""'):
        return "{}"
    if value.startswith("{"):
        return value
    inner = _text(value)
    try:
        parsed = None if inner is None else json.loads(inner)
    except (ValueError, RecursionError):
        return None
    return inner if isinstance(parsed, dict) and not nests_deeper(parsed) else None
