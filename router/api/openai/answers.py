"""Answers: whole ones as objects, streamed ones as bytes around a prefix encoded once per choice."""

from __future__ import annotations

from typing import Any

from router.api.answering import DONE
from router.api.collection import CollectedChoice
from router.api.event_ids import EventIds
from router.api.event_json import encode_event
from router.api.openai.logprobs import chat_logprobs, completion_logprobs
from router.streams.generation import ChoiceCounts, Generation
from router.text.detokenize import DetokenizerFactory
from wire.request import OutputDelta, TokenLogprobs


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object."""
    prompt, completion = generation.prompt_tokens(), generation.output_tokens()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens()},
    }


class Style:
    """What differs between chat and completions: object names and the inside of a choice."""

    object_name: str
    chunk_name: str
    id_prefix: str
    before_first: bytes  # between `"index":N` and the text of a choice's first chunk
    before: bytes  # and of those that follow
    after: bytes  # between the text and the value of "logprobs"

    def __init__(self, detokenizers: DetokenizerFactory, with_logprobs: bool) -> None:
        self._detokenizers = detokenizers
        self.with_logprobs = with_logprobs
        self._offsets: dict[int, int] = {}  # choice -> characters streamed so far

    def choice(self, index: int, collected: CollectedChoice) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def logprobs(self, index: int, text: str, tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
        """The log-probabilities of a chunk."""
        raise NotImplementedError

    def replayed(self, index: int, text: str) -> None:
        """The client has this text already."""
        self._offsets[index] = self._offsets.get(index, 0) + len(text)


class ChatStyle(Style):
    """chat.completion."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    before_first = b',"delta":{"role":"assistant","content":'
    before = b',"delta":{"content":'
    after = b'},"logprobs":'

    def choice(self, index: int, collected: CollectedChoice) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            logprobs = chat_logprobs(self._detokenizers, collected.tokens, collected.logprobs)
        return {
            "index": index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": collected.finish,
        }

    def logprobs(self, index: int, text: str, tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:  # noqa: ARG002
        return chat_logprobs(self._detokenizers, tokens, logprobs)


class CompletionStyle(Style):
    """text_completion."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"
    before_first = b',"text":'
    before = b',"text":'
    after = b',"logprobs":'

    def choice(self, index: int, collected: CollectedChoice) -> dict[str, Any]:
        logprobs = None
        if self.with_logprobs:
            logprobs = completion_logprobs(self._detokenizers, collected.tokens, collected.logprobs, 0)
        return {
            "index": index,
            "text": collected.text,
            "logprobs": logprobs,
            "finish_reason": collected.finish,
        }

    def logprobs(self, index: int, text: str, tokens: list[int], logprobs: list[TokenLogprobs]) -> Any:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        return completion_logprobs(self._detokenizers, tokens, logprobs, offset)


class SseWriter:
    """One request's events, in order. Implements StreamedAnswer. All but text and finish is encoded once."""

    def __init__(
        self, style: Style, request_id: str, created: int, model: str, include_usage: bool, ids: EventIds
    ) -> None:
        head = {
            "id": style.id_prefix + request_id,
            "object": style.chunk_name,
            "created": created,
            "model": model,
        }
        self._head = b"data: " + encode_event(head)[:-1]
        self._include_usage = include_usage
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._running = style.after + b'null,"finish_reason":null' + self._end
        self._style = style
        self._ids = ids
        self._before: dict[int, bytes] = {}  # choice -> what its events begin with, after the first
        self.events: list[bytes] = []
        self.unread = 0

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add one event."""
        event_id = self._ids.after(choice, delta.finish is not None)
        before = self._before.get(choice.index) or self._first(choice.index)
        if delta.finish is None and (delta.logprobs is None or not self._style.with_logprobs):
            event = event_id + before + encode_event(text) + self._running
        else:
            event = event_id + before + encode_event(text) + self._rest(choice.index, text, delta)
        self.events.append(event)
        self.unread += len(event)

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:  # noqa: ARG002
        """What follows is no longer the choice's first event."""
        self._first(choice.index)
        self._style.replayed(choice.index, text)

    def take(self) -> bytes:
        """The events that have not been taken yet."""
        events, self.events = self.events, []
        self.unread = 0
        return events[0] if len(events) == 1 else b"".join(events)

    def end(self, generation: Generation) -> bytes:
        """The end of the stream: a chunk with the usage, if asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + encode_event(usage(generation)) + b"}\n\n" + DONE

    def _first(self, index: int) -> bytes:
        start = self._head + b',"choices":[{"index":' + str(index).encode()
        self._before[index] = start + self._style.before
        return start + self._style.before_first

    def _rest(self, index: int, text: str, delta: OutputDelta) -> bytes:
        told = None
        if delta.logprobs is not None and self._style.with_logprobs:
            told = self._style.logprobs(index, text, delta.tokens, delta.logprobs)
        return (
            self._style.after
            + encode_event(told)
            + b',"finish_reason":'
            + encode_event(delta.finish)
            + self._end
        )
