"""Parsers of output as generators: they read a text as if it were there, and wait where it is not yet.

A parser yields a part when it has one, and None where it needs more text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from router.text.output_parts import CallBroken, Content, Part, Reasoning

_WORD = re.compile(r"[\w.:/-]{0,256}")
MOST_SPACE = 64
"""Characters of white space that wait for what follows: some models never end with it."""

_AT_ONCE = 4096
"""Characters that are read together. Marker after marker is taken from the text, and each time the rest of it
is copied, and searched for those that it has not: of a long text at once that takes quadratic time."""

Returned = TypeVar("Returned")
Reading = Generator[Part | None, None, Returned]


class Source:
    """The text of one choice that has come and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False  # nothing follows
        self.taken = 0  # characters
        self.thought_bounds: list[int] = []  # where thoughts begin and end; the last may not have ended
        self._recorded: list[str] = []
        self._records = True

    def take(self, count: int) -> str:
        """The next characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self.taken += len(taken)
        if self._records:
            self._recorded.append(taken)
        return taken

    def put_back(self, taken: str) -> None:
        """What was taken last comes next."""
        self.text = taken + self.text
        self.taken -= len(taken)

    def record(self, before: str = "") -> None:
        """Record what is taken from here on, behind `before`."""
        self._recorded = [before]
        self._records = True

    def forget(self) -> None:
        """Record no more."""
        self._recorded = []
        self._records = False

    @property
    def recorded(self) -> str:
        """Everything that was taken since `record`."""
        return "".join(self._recorded)


class ReadingParser:
    """Drives a reading. Implements OutputParser."""

    def __init__(self, source: Source, reading: Reading[None], hidden: Sequence[str] = ()) -> None:
        """`hidden`: special tokens that are left out where they are not understood."""
        self._source = source
        self._reading = reading
        self._hidden = hidden

    @property
    def thought_bounds(self) -> Sequence[int]:
        return self._source.thought_bounds

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for start in range(0, len(text), _AT_ONCE):
            self._source.text += text[start : start + _AT_ONCE]
            parts += self._read()
        return parts

    def end(self) -> list[Part]:
        self._source.ended = True
        return self._read()

    def _read(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._reading:
            if part is None:
                break
            shown = self._without_hidden(part)
            if shown is not None:
                parts.append(shown)
        return parts

    def _without_hidden(self, part: Part) -> Part | None:
        match part:
            case Content(text) if self._hidden:
                text = self._shown(text)
                return Content(text) if text else None
            case Reasoning(text) if self._hidden:
                text = self._shown(text)
                return Reasoning(text) if text else None
            case CallBroken(index, text):
                return CallBroken(index, self._shown(text))
            case _:
                return part

    def _shown(self, text: str) -> str:
        for token in self._hidden:
            text = text.replace(token, "")
        return text


def until(source: Source, markers: Sequence[str], part: Callable[[str], Part]) -> Reading[tuple[str, str]]:
    """Take the text before the first of the markers, as parts, and that marker.

    Returns the white space before the marker, which is in no part, and the marker; ("", "") at the end of the
    text.
    """
    source.forget()
    while True:
        at, marker = _first(source.text, markers)
        if marker:
            before = source.take(at)
            shown = _without_space(before)
            source.take(len(marker))
            if shown:
                yield part(shown)
            return before[len(shown) :], marker
        if source.ended:
            if source.text:
                yield part(source.take(len(source.text)))
            return "", ""
        held = _begun(source.text, markers)
        shown = _without_space(source.text[: len(source.text) - held])
        if shown:
            yield part(source.take(len(shown)))
        yield None


def skip_space(source: Source, characters: str | None = None) -> Reading[str]:
    """Take white space, or these characters. Returns the one after it, which is not taken; "" at the end of
    the text."""
    while True:
        source.take(len(source.text) - len(source.text.lstrip(characters)))
        if source.text or source.ended:
            return source.text[:1]
        yield None


def accept(source: Source, *words: str) -> Reading[str]:
    """Take one of these words, if the text goes on with it. Returns it, else ""."""
    while True:
        for word in words:
            if source.text.startswith(word):
                return source.take(len(word))
        if source.ended or not any(word.startswith(source.text) for word in words):
            return ""
        yield None


def next_character(source: Source) -> Reading[str]:
    """The first character behind white space, without taking anything; "" at the end of the text, or of much
    white space."""
    while True:
        text = source.text.lstrip()
        space = len(source.text) - len(text)
        if text or source.ended or space > MOST_SPACE:
            return "" if space > MOST_SPACE else text[:1]
        yield None


def word(source: Source) -> Reading[str]:
    """Take letters, digits, and what else names of functions have."""
    while True:
        found = _WORD.match(source.text)
        assert found is not None
        if found.end() < len(source.text) or source.ended:
            return source.take(found.end())
        yield None


def through(source: Source, marker: str, most: int) -> Reading[str | None]:
    """Take the text before a marker, and the marker. Returns that text; None, with nothing taken, if the text
    ends before, or goes on for more than `most` characters."""
    searched = 0
    while True:
        at = source.text.find(marker, searched, most + len(marker))
        if at >= 0:
            taken = source.take(at)
            source.take(len(marker))
            return taken
        if source.ended or len(source.text) >= most + len(marker):
            return None
        searched = max(0, len(source.text) - len(marker) + 1)
        yield None


def pieces(source: Source, marker: str, part: Callable[[str], Part]) -> Reading[bool]:
    """Take the text before a marker, white space and all, as parts while it comes, and the marker. Returns
    False if the text ends before it."""
    while True:
        at = source.text.find(marker)
        held = 0 if source.ended else _begun(source.text, (marker,))
        count = at if at >= 0 else len(source.text) - held
        if count:
            yield part(source.take(count))
        if at >= 0:
            source.take(len(marker))
            return True
        if source.ended:
            return False
        yield None


def rest(source: Source) -> Reading[None]:
    """All that follows is content."""
    source.forget()
    while not source.ended or source.text:
        if source.text:
            yield Content(source.take(len(source.text)))
        else:
            yield None


def _without_space(text: str) -> str:
    """Without the white space at its end, of which MOST_SPACE characters are taken away at most."""
    space = len(text) - len(text.rstrip())
    return text[: len(text) - min(space, MOST_SPACE)]


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """The place of the first marker, and that marker: the longer one of two at one place; (-1, "")."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker


def _begun(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
