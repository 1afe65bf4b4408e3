"""JsonScanner: finds the end of a JSON value whose text is still growing, and whether it is one.

Libraries that read unfinished JSON read it anew with every piece, which takes quadratic time, and do not give
the text of a value inside.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any

DEEPEST = 64  # arrays and objects in one another
_SPACE = " \t\n\r"
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_IN_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_LONGEST_SCALAR = 4096  # characters of a number
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = frozenset("0123456789abcdefABCDEF")


def nests_deeper(value: Any, levels: int = DEEPEST) -> bool:
    """Whether a value that was read otherwise has more arrays and objects in one another."""
    if not isinstance(value, dict | list | tuple):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(nests_deeper(one, levels - 1) for one in inner)


class _Next(Enum):
    VALUE = auto()
    ITEM = auto()  # or the end of an empty array
    KEY = auto()
    FIRST_KEY = auto()  # or the end of an empty object
    COLON = auto()
    COMMA = auto()  # or the end of what is open
    STRING = auto()  # more of it, or its end
    ESCAPED = auto()
    HEX = auto()
    SCALAR = auto()


class JsonScanner:
    """Reads one value. A line end within a string, which models write and JSON forbids, is escaped."""

    def __init__(self) -> None:
        self.done = False  # the value is complete
        self.broken = False  # it is no JSON
        self._next = _Next.VALUE
        self._open: list[str] = []  # the closing brackets that are due, the outermost first
        self._is_key = False
        self._hex = 0  # digits of \uXXXX that are due
        self._scalar = ""

    def take(self, text: str) -> tuple[int, str]:
        """How many characters of the text belong to the value, and the JSON that they are."""
        at, valid = 0, []
        while at < len(text) and not (self.done or self.broken):
            if self._next is _Next.STRING and (run := _PLAIN.match(text, at)):
                valid.append(run[0])
                at = run.end()
                continue
            char = text[at]
            if self._next is _Next.SCALAR and char not in _IN_SCALAR:
                self._end_scalar()  # this character is not part of it
                continue
            written = self._step(char)
            if not self.broken:
                valid.append(written)
                at += 1
        return at, "".join(valid)

    def _step(self, char: str) -> str:
        match self._next:
            case _Next.STRING:
                return self._in_string(char)
            case _Next.ESCAPED:
                self._hex = 4 if char == "u" else 0
                self._next = _Next.HEX if self._hex else _Next.STRING
                self.broken = char not in '"\\/bfnrtu'
            case _Next.HEX:
                self._hex -= 1
                self._next = _Next.HEX if self._hex else _Next.STRING
                self.broken = char not in _HEX
            case _Next.SCALAR:
                self._scalar += char
                self.broken = len(self._scalar) > _LONGEST_SCALAR
            case _ if char in _SPACE:
                pass
            case _Next.COLON:
                self._next = _Next.VALUE
                self.broken = char != ":"
            case _Next.COMMA:
                self._after_value(char)
            case _:
                self._begin(char)
        return char

    def _in_string(self, char: str) -> str:
        if char == '"':
            if self._is_key:
                self._is_key, self._next = False, _Next.COLON
            else:
                self._end_value()
        elif char == "\\":
            self._next = _Next.ESCAPED
        else:  # a control character
            return f"\\u{ord(char):04x}"
        return char

    def _after_value(self, char: str) -> None:
        if char == self._open[-1]:
            self._close()
        elif char == ",":
            self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
        else:
            self.broken = True

    def _begin(self, char: str) -> None:
        """A value, a key, or the end of what is empty."""
        state = self._next
        if state in (_Next.FIRST_KEY, _Next.ITEM) and char == self._open[-1]:
            self._close()
        elif state in (_Next.KEY, _Next.FIRST_KEY):
            self._is_key, self._next = True, _Next.STRING
            self.broken = char != '"'
        elif char == '"':
            self._next = _Next.STRING
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._next = _Next.FIRST_KEY if char == "{" else _Next.ITEM
            self.broken = len(self._open) > DEEPEST
        else:
            self._scalar, self._next = char, _Next.SCALAR
            self.broken = char not in _IN_SCALAR

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_scalar(self) -> None:
        if _SCALAR.fullmatch(self._scalar) is None:
            self.broken = True
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._next = _Next.COMMA
        self.done = not self._open
