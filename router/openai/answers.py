"""Answers: whole ones as objects, streamed ones as bytes around a prefix that is encoded once per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.detokenize import DetokenizerFactory
from router.generation import Delta, Generation
from router.openai.logprobs import chat_logprobs, completion_logprobs
from wire.messages import FinishReason, TokenLogprobs

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object."""
    prompt, completion = generation.prompt_tokens(), generation.completion_tokens()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens()},
    }


@dataclass(slots=True)
class Collected:
    """Everything one choice has said."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    matched: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


async def collect(generation: Generation) -> list[Collected]:
    """Wait for every choice. [] when the client has gone. Raises what ended the request."""
    choices = [Collected() for _ in generation.outputs]
    while deltas := await generation.next():
        for delta in deltas:
            choice = choices[delta.index]
            choice.texts.append(delta.text)
            choice.tokens += delta.tokens
            choice.logprobs += delta.logprobs or []
            choice.finish, choice.matched = delta.finish, delta.matched
    return [] if generation.abandoned() else choices


class Style:
    """What differs between chat and completions: object names and the inside of a choice."""

    object_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, detokenizers: DetokenizerFactory, with_logprobs: bool) -> None:
        self._detokenizers = detokenizers
        self._with_logprobs = with_logprobs
        self._offsets: dict[int, int] = {}  # choice -> characters streamed so far

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def chunk(self, delta: Delta, first: bool) -> bytes:
        """The JSON between a chunk's `"index":N` and its `"finish_reason"`, commas included."""
        raise NotImplementedError


class ChatStyle(Style):
    """chat.completion."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """See Style."""
        logprobs = None
        if self._with_logprobs:
            logprobs = chat_logprobs(self._detokenizers, collected.tokens, collected.logprobs)
        return {
            "index": index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": collected.finish,
        }

    def chunk(self, delta: Delta, first: bool) -> bytes:
        """See Style."""
        head = b',"delta":{"role":"assistant","content":' if first else b',"delta":{"content":'
        body = head + _encode(delta.text) + b'},"logprobs":'
        if not self._with_logprobs or delta.logprobs is None:
            return body + b"null,"
        return body + _encode(chat_logprobs(self._detokenizers, delta.tokens, delta.logprobs)) + b","


class CompletionStyle(Style):
    """text_completion."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """See Style."""
        logprobs = None
        if self._with_logprobs:
            logprobs = completion_logprobs(self._detokenizers, collected.tokens, collected.logprobs, 0)
        return {
            "index": index,
            "text": collected.text,
            "logprobs": logprobs,
            "finish_reason": collected.finish,
        }

    def chunk(self, delta: Delta, first: bool) -> bytes:  # noqa: ARG002  chat alone names a role first
        """See Style."""
        body = b',"text":' + _encode(delta.text) + b',"logprobs":'
        if not self._with_logprobs or delta.logprobs is None:
            return body + b"null,"
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + len(delta.text)
        return (
            body
            + _encode(completion_logprobs(self._detokenizers, delta.tokens, delta.logprobs, offset))
            + b","
        )


class SseWriter:
    """One request's events. Everything but index, text and finish is encoded once."""

    def __init__(self, style: Style, request_id: str, created: int, model: str, include_usage: bool) -> None:
        head = {
            "id": style.id_prefix + request_id,
            "object": style.chunk_name,
            "created": created,
            "model": model,
        }
        self._head = b"data: " + _encode(head)[:-1]
        self._start = self._head + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._running = b'"finish_reason":null' + self._end
        self._style = style
        self._begun: set[int] = set()

    def events(self, deltas: list[Delta]) -> bytes:
        """One event per delta."""
        return b"".join([self._event(delta) for delta in deltas])

    def usage(self, generation: Generation) -> bytes:
        """The last chunk when usage was asked for."""
        return self._head + b',"choices":[],"usage":' + _encode(usage(generation)) + b"}\n\n"

    def _event(self, delta: Delta) -> bytes:
        first = delta.index not in self._begun
        if first:
            self._begun.add(delta.index)
        start = self._start + str(delta.index).encode() + self._style.chunk(delta, first)
        if delta.finish is None:
            return start + self._running
        return start + b'"finish_reason":' + _encode(delta.finish) + self._end
