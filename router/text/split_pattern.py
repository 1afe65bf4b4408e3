"""A tokenizer's splitting pattern as steps that C++ can take (router/index/native/word_table.h).

Such patterns are of a simple kind: alternatives, each a row of character classes with a count, where the last
may be followed by "not before one of these" or by an ending that may be there. Anything else is refused: then
Python's `re` cuts the text, and that takes three times as long.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MANY = (1 << 32) - 1
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_ENDINGS = re.compile(r"\(\?i:([^()\[\]\\{}?*+.]*)\)(\??)")
_NOT_BEFORE = "(?!"
_COUNTS = {"?": (0, 1), "*": (0, MANY), "+": (1, MANY)}


class Step(NamedTuple):
    """From `least` to `most` characters of a class, as many as can be; `most` 0: none of it comes next.

    The class is a set of ASCII characters: those below 64, and those from there on, as bits.
    """

    low: int
    high: int
    least: int
    most: int


class Alternative(NamedTuple):
    """Steps in a row; then, if one of them fits, an ending, the first that does."""

    steps: list[Step]
    endings: list[list[Step]]


class _NotUnderstood(Exception):
    pass


def split_steps(pattern: str) -> list[Alternative] | None:
    """The alternatives of an ASCII pattern (word_cache.py: ascii_pattern), in order; None: it is not such."""
    try:
        made = [one for text in _alternatives(pattern) for one in _alternative(text)]
    except _NotUnderstood:
        return None
    return made if all(any(step.least for step in one.steps) for one in made) else None


def _alternatives(pattern: str) -> list[str]:
    """Cut at each `|` that is in no class and no group."""
    found, begin, depth, in_class = [], 0, 0, False
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "|" and not depth:
            found.append(pattern[begin:at])
            begin = at + 1
        else:
            depth += (char == "(") - (char == ")")
        at += 1
    return [*found, pattern[begin:]]


def _alternative(text: str) -> list[Alternative]:
    """One; or several, where it is a group of literals."""
    whole = _ENDINGS.fullmatch(text)
    if whole is not None and not whole[2]:
        return [Alternative(steps, []) for steps in _literals(whole[1])]
    steps: list[Step] = []
    at = 0
    while at < len(text):
        ending = _ENDINGS.match(text, at)
        if ending is not None:
            if ending.end() < len(text) or not ending[2]:
                raise _NotUnderstood
            return [Alternative(steps, _literals(ending[1]))]
        if text.startswith(_NOT_BEFORE, at):
            (low, high), at = _class(text, at + len(_NOT_BEFORE))
            if text[at:] != ")":
                raise _NotUnderstood
            steps.append(Step(low, high, 0, 0))
            break
        (low, high), at = _class(text, at)
        (least, most), at = _count(text, at)
        steps.append(Step(low, high, least, most))
    return [Alternative(steps, [])]


def _literals(group: str) -> list[list[Step]]:
    """`a|bc`, in either case."""
    return [[Step(*_bits({char.lower(), char.upper()}), 1, 1) for char in one] for one in group.split("|")]


def _class(text: str, at: int) -> tuple[tuple[int, int], int]:
    """The class that begins at `at`, and where it ends."""
    if text[at : at + 1] != "[":
        if text[at : at + 1] in tuple("(){}?*+.^$|]") or at >= len(text):
            raise _NotUnderstood
        char, at = _char(text, at)
        return _bits({char}), at
    negated = text[at + 1 : at + 2] == "^"
    at += 2 if negated else 1
    members: set[str] = set()
    while text[at : at + 1] != "]":
        first, at = _char(text, at)
        last = first
        if text[at : at + 1] == "-" and text[at + 1 : at + 2] != "]":
            last, at = _char(text, at + 1)
        members.update(map(chr, range(ord(first), ord(last) + 1)))
    return _bits({chr(code) for code in range(128)} - members if negated else members), at + 1


def _char(text: str, at: int) -> tuple[str, int]:
    char = text[at : at + 1]
    if char == "\\":
        at += 1
        char = _ESCAPES.get(text[at : at + 1], "")
    if not char or not char.isascii():
        raise _NotUnderstood
    return char, at + 1


def _count(text: str, at: int) -> tuple[tuple[int, int], int]:
    """How often what was before `at` may come."""
    counts = (1, 1)
    if text[at : at + 1] in _COUNTS:
        counts, at = _COUNTS[text[at]], at + 1
    elif (found := _COUNT.match(text, at)) is not None:
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else MANY
        counts, at = (least, most), found.end()
        if most < 1 or least > most:
            raise _NotUnderstood
    if text[at : at + 1] in ("?", "+", "*", "{"):  # lazy or possessive, or a count of a count
        raise _NotUnderstood
    return counts, at


def _bits(members: set[str]) -> tuple[int, int]:
    mask = sum(1 << ord(char) for char in members)
    return mask & ((1 << 64) - 1), mask >> 64
