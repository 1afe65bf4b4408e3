"""The parts of an answer: what the model thought, what it says, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Calls of one answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. Together they are the JSON of an object, unless the call is broken."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that has begun is none: its arguments are no JSON object, or break off.

    `text` is everything that the model wrote of it. What is known to be no call before it begins is Content.
    """

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments | CallBroken


class OutputParser(Protocol):
    """Reads the text of one choice while it grows. No text makes it fail.

    What it has said after a text does not depend on the pieces in which that text came.
    """

    @property
    def thought_bounds(self) -> Sequence[int]:
        """Where in the text thoughts begin and end, tags included, in characters. The last may not have
        ended."""

    def feed(self, text: str) -> list[Part]:
        """What the next piece of the text adds. A piece may add nothing: it may be the beginning of a
        marker."""

    def end(self) -> list[Part]:
        """What was held back, after the last piece."""


@dataclass(slots=True)
class Call:
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


class Said:
    """Everything that the parts of one choice say."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self._calls: dict[int, Call] = {}

    @property
    def calls(self) -> list[Call]:
        """The calls in order, without broken ones."""
        return list(self._calls.values())

    def add(self, parts: Iterable[Part]) -> None:
        """Add what follows. The text of a broken call becomes content."""
        for part in parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(index, call_id, name):
                    self._calls[index] = Call(call_id, name)
                case CallArguments(index, text):
                    self._calls[index].arguments += text
                case CallBroken(index, text):
                    del self._calls[index]
                    self.content += text
