"""Which characters of a rendered chat the template wrote: a marked template writes its control tokens marked.

A control token is one that only the template may put into a chat: `<|im_end|>`, `<think>`. Each character of
control tokens has a mark, a code point that no request can bring. Where a template writes marks for its own
texts, it renders the same chat, and what has its usual characters came from the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jinja2 import nodes

from router.text.longest_text import NOTHING, any_of

# Halves of surrogate pairs: neither UTF-8 nor JSON can bring one, and Python's strings can hold it.
_MARKS = range(0xD800, 0xE000)
# A template may make a control token of a role: '<|' + message.role + '|>'.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython", "model")
# What leaves the characters of its input as they are, or takes some away at an end.
_PLAIN_METHODS = {
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "get", "items",
    "keys", "values", "join", "append",
}  # fmt: skip
_PLAIN_FILTERS = {
    "trim", "length", "count", "list", "string", "safe", "tojson", "items", "dictsort", "int", "float",
    "default", "d", "join", "map", "select", "reject", "selectattr", "rejectattr", "first", "last", "sort",
    "unique", "indent",
}  # fmt: skip
_PLACEHOLDER = re.compile(r"(%[a-z]|\{\w*\})")  # of a format, where a constant is one
_PUT_OUT_THEIR_ARGUMENTS = {"default", "d", "join", "append", "format"}


class TemplateMarks:
    """The marks for the characters of control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts` are the control tokens."""
        self._texts = frozenset(texts)
        self._beginnings = {text[:length] for text in self._texts for length in range(1, len(text))}
        chars = sorted({char for text in self._texts for char in text if not char.isspace()})
        # A token with a character beyond the last mark is never found: it stays text.
        pairs = dict(zip(chars, map(chr, _MARKS), strict=False))
        self._ends = {char for text in self._texts for char in (text[0], text[-1]) if not char.isalnum()}
        self._to_marks = str.maketrans(pairs)
        self._to_usual = str.maketrans({mark: char for char, mark in pairs.items()})
        self._written = any_of({form for text in self._texts for form in self._forms(text)}) or NOTHING

    def marked(self, text: str) -> str:
        """The text, as long as it was, with marks for all characters that have one."""
        return text.translate(self._to_marks)

    def split(self, rendered: str) -> list[str]:
        """A chat that a marked template rendered: in turn a text and a control token of the template."""
        return [part.translate(self._to_usual) for part in self._written.split(rendered)]

    def mark(self, template: nodes.Template) -> nodes.Template:
        """Mark what the template puts out, and not what it compares or searches for."""
        self._mark(template, True)
        return template

    def is_plain(self, template: nodes.Template) -> bool:
        """Whether a template only puts texts behind one another, and none of its own ends within a control
        token. Then nothing of a request becomes part of one unless a text of it spells or begins one."""
        calls = (call.node for call in template.find_all(nodes.Call))
        methods = {node.attr for node in calls if isinstance(node, nodes.Getattr)}
        filters = {one.name for one in template.find_all(nodes.Filter)}
        formats = any(isinstance(one.left, nodes.Const) for one in template.find_all(nodes.Mod))
        if not (methods <= _PLAIN_METHODS and filters <= _PLAIN_FILTERS) or formats:
            return False
        return not any(self._ends_within_one(text) for text in _texts(template))

    def _ends_within_one(self, text: str) -> bool:
        return any(text[start:] in self._beginnings for start in range(len(text)))

    def _has_an_end(self, value: object) -> bool:
        """Whether a constant may be a control token, or begin or end one."""
        return isinstance(value, str) and not self._ends.isdisjoint(value)

    def _forms(self, text: str) -> Iterator[str]:
        yield self.marked(text)
        for role in _ROLES:
            before, found, after = text.partition(role)
            if found:
                yield self.marked(before) + role + self.marked(after)

    def _mark(self, node: nodes.Node, is_output: bool) -> None:
        if isinstance(node, nodes.TemplateData):
            node.data = self.marked(node.data)
        elif is_output and isinstance(node, nodes.Const) and self._has_an_end(node.value):
            parts = _PLACEHOLDER.split(node.value)
            node.value = "".join(part if at % 2 else self.marked(part) for at, part in enumerate(parts))
        for name, value in node.iter_fields():
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, nodes.Node):
                    self._mark(child, is_output and _puts_out(node, name))


def _puts_out(node: nodes.Node, field: str) -> bool:
    """Whether the template may put out what this field of a node has. Or it compares or searches with it."""
    match node:
        case nodes.Compare() | nodes.Test():
            return False
        case nodes.If() | nodes.CondExpr():
            return field != "test"
        case nodes.For():
            return field not in ("iter", "test")
        case nodes.Getitem():
            return field != "arg"
        case nodes.Pair():
            return field != "key"
        case nodes.Filter():
            return field == "node" or node.name in _PUT_OUT_THEIR_ARGUMENTS
        case nodes.Call() if field != "node" and isinstance(node.node, nodes.Getattr):
            return node.node.attr in _PUT_OUT_THEIR_ARGUMENTS
        case _:
            return True


def _texts(template: nodes.Template) -> Iterator[str]:
    for data in template.find_all(nodes.TemplateData):
        yield data.data
    for const in template.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value
