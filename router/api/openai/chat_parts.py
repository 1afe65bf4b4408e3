"""PartsStyle: chats whose outputs are read as reasoning, content and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.api.collection import CollectedChoice
from router.api.openai.answers import ChatStyle
from router.api.openai.shown import Shown
from router.streams.generation import ChoiceCounts, Submission
from router.text.detokenize import DetokenizerFactory
from router.text.output_formats import Parsing
from router.text.output_parts import (
    CallArguments,
    CallBroken,
    CallStart,
    Content,
    OutputParser,
    Part,
    Reasoning,
    Said,
)
from router.text.token_starts import TokenStarts
from wire.request import FinishReason, OutputDelta

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class PartsWanted:
    """Which parts an answer tells."""

    reasoning: bool = True
    several_calls: bool = True

    def of(self, parts: list[Part]) -> list[Part]:
        """Those of the parts that are told."""
        return [part for part in parts if self._has(part)]

    def _has(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return self.reasoning
            case CallStart(index=index) | CallArguments(index=index) | CallBroken(index=index):
                return index == 0 or self.several_calls
            case _:
                return True


class PartsStyle(ChatStyle):
    """chat.completion with reasoning_content and tool_calls. A chunk has the parts that its tokens add."""

    before_first = b',"delta":'
    before = b',"delta":'
    after = b',"logprobs":'

    def __init__(
        self, detokenizers: DetokenizerFactory, shown: Shown, parsing: Parsing, wanted: PartsWanted
    ) -> None:
        super().__init__(detokenizers, shown)
        self._parsing = parsing
        self._wanted = wanted
        self._parsers: dict[int, OutputParser] = {}
        self._calls: dict[int, set[int]] = {}  # choice -> the calls that have begun and are not broken
        self._starts: dict[int, TokenStarts] = {}

    @property
    def form(self) -> str:
        return f"{super().form}+parts{self._wanted}"

    def choice(
        self, counts: ChoiceCounts, collected: CollectedChoice, submission: Submission
    ) -> dict[str, Any]:
        parser, said = self._parser(counts.index, submission), Said()
        said.add(self._wanted.of(parser.feed(collected.text) + parser.end()))
        counts.reasoning_tokens = collected.starts.between(parser.thought_bounds)
        told = super().choice(counts, collected, submission)
        if said.calls and collected.finish is FinishReason.STOP:
            told["finish_reason"] = TOOL_CALLS
        return {**told, "message": self._message(said)}

    def told(
        self, counts: ChoiceCounts, text: str, delta: OutputDelta, is_first: bool, submission: Submission
    ) -> dict[str, Any]:
        index = counts.index
        parser = self._parser(index, submission)
        starts = self._starts[index]
        starts.add(text, delta)
        parts = parser.feed(text)
        if delta.finish is not None:
            parts += parser.end()
        if delta.finish is not None or self.shown.running_usage:
            counts.reasoning_tokens = starts.between(parser.thought_bounds)
        told = self._delta(index, self._wanted.of(parts), delta.finish)
        if is_first:
            return {"role": "assistant", "content": "", **told}
        return told or {"content": ""}

    def finish(self, index: int, finish: FinishReason | None) -> str | None:
        if finish is FinishReason.STOP and self._calls.get(index):
            return TOOL_CALLS
        return finish

    def replayed(self, counts: ChoiceCounts, text: str, delta: OutputDelta, submission: Submission) -> None:
        index = counts.index
        parts = self._parser(index, submission).feed(text)
        self._starts[index].add(text, delta)
        self._delta(index, self._wanted.of(parts), None)

    def _parser(self, index: int, submission: Submission) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._parsing.parser(submission.first_room + index)
            self._starts[index] = TokenStarts()
        return parser

    def _message(self, said: Said) -> dict[str, Any]:
        has_more = bool(said.calls or said.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content or (None if has_more else ""),
            "refusal": None,
        }
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message[TOOL_CALLS] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return message

    def _delta(self, index: int, parts: list[Part], finish: FinishReason | None) -> dict[str, Any]:
        """What parts add. A call that breaks off with the whole output is not said once more as content."""
        delta: dict[str, Any] = {}
        begun = self._calls.setdefault(index, set())
        for part in parts:
            match part:
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case CallStart(call, call_id, name):
                    begun.add(call)
                    function = {"name": name, "arguments": ""}
                    entry = {"index": call, "id": call_id, "type": "function", "function": function}
                    delta.setdefault(TOOL_CALLS, []).append(entry)
                case CallArguments(call, text):
                    entries = delta.setdefault(TOOL_CALLS, [])
                    if not entries or entries[-1]["index"] != call:
                        entries.append({"index": call, "function": {"arguments": ""}})
                    entries[-1]["function"]["arguments"] += text
                case CallBroken(call, text):
                    begun.discard(call)
                    if finish is not FinishReason.LENGTH:
                        delta["content"] = delta.get("content", "") + text
        return delta
