"""Harmony, gpt-oss's format: messages in channels. `analysis` is reasoning, `final` is content, and a message
to a function is a call.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.text.output_parts import Content, Part, Reasoning
from router.text.output_source import Reading, Source, skip_space, through, until
from router.text.tool_formats.calls import Calls, named_call
from router.text.tool_formats.syntax import CallSyntax, Markers

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_HEADS = (START, CHANNEL)
BEFORE_HEADS = (*_HEADS, CONSTRAIN)
"""What follows one of these up to the next marker is of a head, and nobody is told."""
_ADDRESSED = ("to=functions.", " to=functions.")
_LONGEST_HEAD = 512  # characters
_FUNCTION = re.compile(r"to=functions\.([\w.:/-]+)")
_ANALYSIS = re.compile(r"(^|<\|channel\|>)\s*analysis\b")


def _call(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (f"commentary to=functions.{name} ", CONSTRAIN, "json", MESSAGE), ()


SYNTAX = CallSyntax(_call, trigger=CHANNEL, between=(END, START, "assistant", CHANNEL))


def thoughts(markers: Markers) -> str:
    """Messages of reasoning that may come before an answer, in Lark."""
    lark = markers.lark
    return f"({lark(CHANNEL, 'analysis', MESSAGE)} TEXT {lark(END, START, 'assistant')})*"


def final(markers: Markers, body: str) -> str:
    """A message to the user, in Lark."""
    return f"{markers.lark(CHANNEL, 'final', MESSAGE)} {body}"


def read(source: Source, calls: Calls | None, with_reasoning: bool) -> Reading[None]:
    """Messages of all channels. Without `calls`, a message to a function is content."""
    found = START if (yield from _is_addressed(source)) else (yield from until(source, MARKERS, Content))[1]
    while found:
        if found not in _HEADS:
            _, found = yield from until(source, MARKERS, Content)
            continue
        head = yield from through(source, MESSAGE, _LONGEST_HEAD)
        if head is None:
            if source.ended:
                return  # an output that is cut here has begun no message
            _, found = yield from until(source, _ENDS, Content)
            continue
        function = _FUNCTION.search(head)
        if function is not None and calls is not None:
            source.record()
            yield from named_call(source, calls, function[1])
            yield from skip_space(source)
        is_thought = with_reasoning and _ANALYSIS.search(head) is not None
        part: Callable[[str], Part] = Reasoning if is_thought else Content
        if is_thought:
            source.thought_bounds.append(source.taken)
        _, found = yield from until(source, _ENDS, part)
        if is_thought:
            source.thought_bounds.append(source.taken)


def _is_addressed(source: Source) -> Reading[bool]:
    """Whether an output begins with the function that its first message is to: that belongs to the head which
    the prompt has begun with `<|start|>assistant`."""
    while not source.text.startswith(_ADDRESSED):
        if source.ended or not any(one.startswith(source.text) for one in _ADDRESSED):
            return False
        yield None
    return True
