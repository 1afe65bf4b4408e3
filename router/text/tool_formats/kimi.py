"""Kimi K2's format, between tokens of its own: `functions.NAME:NUMBER`, the call's id, and its arguments.

Its templates show the model that id again beside the result, so calls keep the ids that it gave them.
"""

from __future__ import annotations

from router.text.output_parts import Content
from router.text.output_source import Reading, Source, through
from router.text.tool_formats.calls import Calls, CallTokens, named_call, read_between
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
        return (yield from named_call(source, calls, _name(own_id), own_id))

    return read_between(source, CallTokens(BEGIN, END, CALL, CALL_END), one)


def _name(own_id: str) -> str:
    """`functions.NAME:NUMBER` -> NAME, which may have points and colons in it."""
    before, colon, number = own_id.rpartition(":")
    name = before if colon and number.isdecimal() else own_id
    return name.removeprefix("functions.")
