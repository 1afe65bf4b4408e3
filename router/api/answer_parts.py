"""What the forms of answers with items or blocks have in common: the parts of a text, and drafts."""

from __future__ import annotations

from typing import Any, Protocol

from common.errors import InvalidRequest
from router.api.tool_fields import ToolChoice, tool_names
from router.streams.generation import ChoiceCounts
from router.text.output_formats import Parsing
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content, Part
from wire.request import FinishReason, OutputDelta


def names_of(tools: list[dict[str, Any]] | None) -> frozenset[str] | None:
    """The names of a chat's tools; None: it has none, or none is to be called."""
    return tool_names(tools) if tools else None


def refuse_forced(choice: ToolChoice) -> None:
    """Raises InvalidRequest for calls that must be made: whether one is, is the model's to say here."""
    if choice not in ("auto", "none"):
        raise InvalidRequest("calls cannot be forced here: only 'auto' and 'none' are taken", "tool_choice")


class AnswerParts:
    """The parts of one choice's text while it comes."""

    def __init__(self, parsing: Parsing | None, room: int, several_calls: bool = True) -> None:
        """Without `parsing` all is content. `room` is the choice's."""
        self._parser = None if parsing is None else parsing.parser(room)
        self._several_calls = several_calls

    def take(self, text: str, finish: FinishReason | None) -> list[Part]:
        """What the next piece of the text adds, and the end."""
        if self._parser is None:
            return [Content(text)] if text else []
        parts = self._parser.feed(text)
        if finish is not None:
            parts += self._parser.end()
        return [part for part in parts if self._several_calls or not _is_further_call(part)]


def _is_further_call(part: Part) -> bool:
    return isinstance(part, CallStart | CallArguments | CallBroken) and part.index > 0


class Draft(Protocol):
    """An answer while it grows."""

    def add(self, counts: ChoiceCounts, text: str, delta: OutputDelta) -> object:
        """Add one delta. Returns the events that tell of it."""


class UnstreamedDraft:
    """Fills a draft, and tells nobody. Implements Answer."""

    unread = 0

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add one delta."""
        self._draft.add(choice, text, delta)
