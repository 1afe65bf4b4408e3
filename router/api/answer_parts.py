"""What the forms of answers with items or blocks have in common: the parts of a text, and drafts."""

from __future__ import annotations

from typing import Protocol

from router.api.tool_fields import ToolFields, tool_schemas
from router.model import Model
from router.service import Router
from router.streams.generation import ChoiceCounts
from router.text.grammars import Wanted
from router.text.output_formats import Parsing
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content, Part
from router.text.token_starts import TokenStarts
from wire.request import Grammar, OutputDelta


async def grammar_and_parsing(
    router: Router,
    model: Model,
    prompt: list[int],
    tools: ToolFields,
    wanted: Wanted | None,
    shows_special: bool = False,
    continued: str = "",
) -> tuple[Grammar | None, Parsing | None]:
    """What the outputs of a chat's prompt have to match, and how they are read. `wanted`: of the content.
    `continued`: the text of the message with which they go on.

    Raises InvalidRequest.
    """
    functions = tools.callable_tools()
    calls = tools.calls_wanted(functions, wanted)
    grammar = await router.grammars.checked(model.wanted_around(prompt, wanted, calls, continued))
    schemas = None if functions is None else tool_schemas(functions)
    return grammar, model.parsing(prompt, schemas, True, shows_special, tools.are_required, continued)


class AnswerParts:
    """The parts of one choice's text while it comes."""

    def __init__(self, parsing: Parsing | None, room: int, several_calls: bool = True) -> None:
        """Without `parsing` all is content. `room` is the choice's."""
        self._parser = None if parsing is None else parsing.parser(room)
        self._several_calls = several_calls
        self._starts = TokenStarts()

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens are thoughts."""
        return 0 if self._parser is None else self._starts.between(self._parser.thought_bounds)

    def take(self, text: str, delta: OutputDelta) -> list[Part]:
        """What a delta, and its text, add."""
        if self._parser is None:
            return [Content(text)] if text else []
        self._starts.add(text, delta)
        parts = self._parser.feed(text)
        if delta.finish is not None:
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
