"""Calls in Python: `[f(a=1), g(b=["x"])]`, as an answer begins or between tokens of their own.

The arguments are literals. A list is read as a whole: Python's parser takes nothing unfinished.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from router.text.json_scanner import nests_deeper
from router.text.output_parts import CallArguments, Content
from router.text.output_source import Reading, Source, accept, next_character, skip_space, until
from router.text.tool_formats.calls import Calls

OPENINGS = ("<|python_start|>", "<|tool_call_start|>")  # Llama 4's, LFM2's
CLOSINGS = ("<|python_end|>", "<|tool_call_end|>")
MARKERS = (*OPENINGS, *CLOSINGS)
_MOST = 1 << 16  # characters of a list
_MAY_BE_CALLS = re.compile(r"\[\s*(?:$|[A-Za-z_][\w.]*\s*(?:$|\())")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_FAILURES = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def read(source: Source, calls: Calls) -> Reading[None]:
    """Content and calls. Without tokens around it, a list has calls if they have the names of tools."""
    if (yield from next_character(source)) == "[":
        source.record()
        yield from _list(source, calls, only_known=True)
    while True:
        space, found = yield from until(source, OPENINGS, Content)
        if not found:
            return
        source.record(space + found)
        yield from _list(source, calls, only_known=False)


def _list(source: Source, calls: Calls, only_known: bool) -> Reading[None]:
    yield from skip_space(source)
    size = yield from _size(source)
    found = _parsed(source.take(size)) if size else None
    if found is None or (only_known and not all(name in calls.tools for name, _ in found)):
        if source.recorded:
            yield Content(source.recorded)
        return
    for name, arguments in found:
        begun = calls.begin(name)
        yield begun
        yield CallArguments(begun.index, arguments)
    yield from skip_space(source)
    yield from accept(source, *CLOSINGS)
    yield from skip_space(source)


def _size(source: Source) -> Reading[int]:
    """Characters of the list with which the text begins; 0: no list of calls begins here."""
    at, depth, quote = 0, 0, ""
    while True:
        if not _MAY_BE_CALLS.match(source.text):
            return 0
        while at < min(len(source.text), _MOST):
            char = source.text[at]
            if quote:
                if char == "\\" and at + 1 == len(source.text):
                    break  # what it escapes has not come yet
                at += char == "\\"
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char in "<\\":
                return 0  # neither is in such a list. The token of the next one has the first: this one ends
            else:
                depth += (char in "([{") - (char in ")]}")
                if not depth:
                    return at + 1
            at += 1
        if source.ended or at >= _MOST:
            return 0
        yield None


def _parsed(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of the calls of a list; None: it is none."""
    try:
        body = ast.parse(text, mode="eval").body
        if not isinstance(body, ast.List) or not body.elts:
            return None
        return [_call(node) for node in body.elts]
    except _FAILURES:
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError, TypeError, RecursionError for what is no call with literals by name."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError
    given: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        given[keyword.arg] = ast.literal_eval(_WithJsonNames().visit(keyword.value))
    if nests_deeper(given):
        raise ValueError
    written = json.dumps(given, ensure_ascii=False, allow_nan=False)
    # Python leaves the halves of a pair of escapes apart: UTF-16 joins them. One alone is no character.
    return ast.unparse(node.func), written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _WithJsonNames(ast.NodeTransformer):
    """Models write true for True."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
