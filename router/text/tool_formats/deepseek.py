"""DeepSeek's formats, between tokens of its own: V3.1's `name<sep>{...}`, and V3's and R1's
`function<sep>name`, a line end, and the arguments as a block of JSON in Markdown."""

from __future__ import annotations

from router.text.output_parts import Content
from router.text.output_source import Reading, Source, accept, skip_space, through, word
from router.text.tool_formats.calls import Calls, CallTokens, named_call, read_between
from router.text.tool_formats.syntax import CallSyntax

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
_BLOCK = "```json"
_LONGEST_NAME = 256  # characters


def _call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (CALL, name, SEPARATOR), (CALL_END,)


def _call_v3(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (CALL, "function", SEPARATOR, f"{name}\n{_BLOCK}\n"), ("\n```", CALL_END)


SYNTAX = CallSyntax(_call, trigger=BEGIN, closing=(END,))
V3_SYNTAX = CallSyntax(_call_v3, trigger=BEGIN, between=("\n",), closing=(END,))


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls of either form."""
    return read_between(source, CallTokens(BEGIN, END, CALL, CALL_END), lambda one: _one(one, calls))


def _one(source: Source, calls: Calls) -> Reading[bool]:
    head = yield from through(source, SEPARATOR, _LONGEST_NAME)
    if head is None:
        yield Content(source.recorded)
        return False
    if head.strip() != "function" or (yield from skip_space(source)) == "{":
        return (yield from named_call(source, calls, head.strip()))
    name = yield from word(source)
    yield from skip_space(source)
    yield from accept(source, _BLOCK)
    if not (yield from named_call(source, calls, name)):
        return False
    yield from skip_space(source)
    yield from accept(source, "```")
    return True
