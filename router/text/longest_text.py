"""Expressions for the longest of many texts at a place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

NOTHING = re.compile("(?!)")


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Any of these, the longest first, as a group; None if there are none."""
    distinct = set(texts)
    return re.compile(f"({expression(distinct)})") if distinct else None


def expression(texts: set[str]) -> str:
    """A regular expression for the longest of these that fits.

    It is a tree of their beginnings. In a row, each of them would be tried wherever one may begin, and some
    tokenizers have a thousand (`[control_1]`, `[control_2]`).
    """
    groups: dict[str, list[str]] = {}
    for text in sorted(texts - {""}):
        groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        shared = _shared(group[0], group[-1])
        branches.append(re.escape(shared) + expression({text[len(shared) :] for text in group}))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def _shared(first: str, last: str) -> str:
    """What both begin with."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
