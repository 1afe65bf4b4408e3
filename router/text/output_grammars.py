"""Grammars of chats: calls that an answer must or may have, and reasoning before what has to match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.reasoning import ReasoningStart, ReasoningTags
from router.text.tool_formats import harmony
from router.text.tool_formats.syntax import CalledTool, CallSyntax, Markers

_TEXT = r"TEXT: /(.|\n)*/"
_LINES = r"/\n{0,2}/"
BODY = "@body"  # what a request wants its content to match (wire.request.Grammar.around)


@dataclass(frozen=True, slots=True)
class CallsWanted:
    """Calls of an answer. `required`: it has one, and nothing else; else it may end with calls."""

    tools: Sequence[CalledTool]
    required: bool
    several: bool

    @property
    def are_strict(self) -> bool:
        """Whether the arguments of any have to follow its schema."""
        return any(tool.follows for tool in self.tools)


def thoughts(tags: ReasoningTags | None, start: ReasoningStart, markers: Markers) -> tuple[str, str]:
    """What stands before an answer, and the rules that it needs; ("", "") for nothing."""
    if tags is None or start is ReasoningStart.NEVER:
        return "", ""
    if markers.is_token(tags.closing):
        rule = f"thoughts: TEXT {markers.lark(tags.closing)}\n"
    else:
        rule = f"thoughts[lazy]: TEXT {markers.lark(tags.closing)}\n"
    whole = f"thoughts {_LINES}"
    if start is ReasoningStart.MAY:
        whole = f"({markers.lark(tags.opening)} {whole})?"
    return whole, rule


def chat_grammar(
    before: tuple[str, str],
    calls: tuple[CallsWanted, CallSyntax] | None,
    markers: Markers,
    has_body: bool,
) -> str:
    """All in Lark. `before` is what `thoughts` returned. With `has_body` the content is @body."""
    first, rules = before
    answer = BODY
    if calls is not None:
        answer, more = _answer(*calls, markers, BODY if has_body else None)
        rules += more
    return f"start: {first} {answer}\n{rules}{_TEXT}\n"


def harmony_grammar(calls: CallsWanted | None, markers: Markers, has_body: bool) -> str:
    """The same for messages in channels; "" for nothing that has to match."""
    if calls is None and not has_body:
        return ""
    answer, rules = harmony.final(markers, BODY if has_body else "TEXT"), ""
    if calls is not None:
        answer, rules = _answer(calls, harmony.SYNTAX, markers, answer)
    return f"start: {harmony.thoughts(markers)} {answer}\n{rules}{_TEXT}\n"


def _answer(calls: CallsWanted, syntax: CallSyntax, markers: Markers, body: str | None) -> tuple[str, str]:
    """Calls, or else a body; None: any text, which calls may follow."""
    names = [f"call_{number}" for number in range(len(calls.tools))]
    rules = f"call: {' | '.join(names)}\n"
    for name, tool in zip(names, calls.tools, strict=True):
        head, tail = syntax.call(tool.name)
        rules += f"{name}: {markers.lark(*head)} {syntax.arguments(tool, markers)} {markers.lark(*tail)}\n"
    further = f"({markers.lark(*syntax.between)} call)*" if calls.several else ""
    rules += f"calls: {markers.lark(*syntax.opening)} call {further} {markers.lark(*syntax.closing)}\n"
    rules += syntax.rules(markers)
    trigger = markers.lark(syntax.trigger)
    if calls.required or body is not None:
        whole = f"{trigger} calls"
        return (whole if calls.required else f"({whole} | {body})"), rules
    if not syntax.trigger:  # calls are all that an answer has, and begin as no text does
        return "(calls | PLAIN)", rules + r"PLAIN: /([^{](.|\n)*)?/" + "\n"
    if markers.is_token(syntax.trigger):
        return f"TEXT ({trigger} calls)?", rules
    return "(triggered calls | TEXT)", rules + f"triggered[lazy]: TEXT {trigger}\n"
