"""Kimi K2's format, between tokens of its own: `functions.NAME:NUMBER`, the call's id, and its arguments.

Its templates show the model that id again beside the result, so calls keep the ids that it gave them. Now and
then a model writes the number alone. Then the arguments tell which tool is called.
"""

from __future__ import annotations

import json

from router.text.output_parts import CallArguments, Content
from router.text.output_source import Reading, Source, skip_space, through
from router.text.tool_formats.calls import Calls, CallTokens, json_value, named_call, read_between
from router.text.tool_formats.syntax import CallSyntax, Expression

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
_LONGEST_ID = 256  # characters


def _call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (CALL, f"functions.{name}:", Expression("[0-9]{1,3}"), ARGUMENTS), (CALL_END,)


SYNTAX = CallSyntax(_call, trigger=BEGIN, closing=(END,))


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls."""

    def one(source: Source) -> Reading[bool]:
        head = yield from through(source, ARGUMENTS, _LONGEST_ID)
        if head is None:
            yield Content(source.recorded)
            return False
        own_id = head.strip()
        if own_id.isdecimal() and own_id not in calls.tools:
            return (yield from _numbered_call(source, calls, own_id))
        return (yield from named_call(source, calls, _name(own_id), own_id))

    return read_between(source, CallTokens(BEGIN, END, CALL, CALL_END), one)


def _numbered_call(source: Source, calls: Calls, number: str) -> Reading[bool]:
    """A call without a name. Its name is known when its arguments are, unless there is one tool alone."""
    if len(calls.tools) == 1:
        (name,) = calls.tools
        return (yield from named_call(source, calls, name, f"functions.{name}:{number}"))
    value = (yield from json_value(source)) if (yield from skip_space(source)) == "{" else None
    found = None if value is None else _called(json.loads(value), calls)
    if value is None or found is None:
        yield Content(source.recorded)
        return False
    begun = calls.begin(found, f"functions.{found}:{number}")
    yield begun
    yield CallArguments(begun.index, value)
    return True


def _called(arguments: dict[str, object], calls: Calls) -> str | None:
    """The tool that takes most of these arguments; None if none does, or several do as well."""
    taken = {name: len(arguments.keys() & _properties(calls, name)) for name in calls.tools}
    most = max(taken.values(), default=0)
    best = [name for name, count in taken.items() if count == most]
    return best[0] if most and len(best) == 1 else None


def _properties(calls: Calls, name: str) -> set[str]:
    properties = calls.schema(name).get("properties")
    return set(properties) if isinstance(properties, dict) else set()


def _name(own_id: str) -> str:
    """`functions.NAME:NUMBER` -> NAME, which may have points and colons in it."""
    before, colon, number = own_id.rpartition(":")
    name = before if colon and number.isdecimal() else own_id
    return name.removeprefix("functions.")
