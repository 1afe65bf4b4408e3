"""Responses as answers: whole ones, and streams of OpenAI's events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common.errors import BatonError, UserError
from router.api.answer_parts import AnswerParts
from router.api.event_json import encode_event
from router.api.event_queue import EventQueue
from router.api.openai.logprobs import TokenNames, chat_logprobs
from router.api.openai.responses.output import Event, OutputItems
from router.api.openai.responses.schema import ResponseBody
from router.api.openai.responses.text_forms import REASONING, SUMMARY
from router.http_errors import to_http
from router.streams.generation import ChoiceCounts, Generation, Submission
from wire.request import FinishReason, OutputDelta

Keep = Callable[[dict[str, Any], OutputItems], None]
"""Keeps a finished response for later turns."""


class ResponseDraft:
    """A response while it grows: what is true of it from the beginning, its items and its counts."""

    def __init__(
        self,
        response_id: str,
        body: ResponseBody,
        submission: Submission,
        parts: AnswerParts,
        names: TokenNames,
    ) -> None:
        self._parts = parts
        self._names = names
        summary = body.reasoning is not None and body.reasoning.wants_summary
        self.output = OutputItems(response_id, SUMMARY if summary else REASONING)
        self._head = _head(response_id, body, submission)
        self._prompt_tokens = len(submission.prompts[0])
        self._counts = ChoiceCounts(0)
        self._finish: FinishReason | None = None

    def add(self, counts: ChoiceCounts, text: str, delta: OutputDelta) -> list[Event]:
        """Add one delta."""
        parts = self._parts.take(text, delta)
        scores = []
        if delta.logprobs is not None:
            scores = chat_logprobs(self._names, delta.tokens, delta.logprobs)["content"]
        events = list(self.output.add(parts, delta.finish is FinishReason.LENGTH, scores))
        self._counts, self._finish = counts, delta.finish
        if delta.finish is not None:
            events += self.output.close("completed" if delta.finish is FinishReason.STOP else "incomplete")
        return events

    def whole(self) -> dict[str, Any]:
        """The finished response, of which nobody was told before."""
        return {**self.finished(), "output": self.output.whole}

    def unfinished(self) -> dict[str, Any]:
        """The response of the first events."""
        return {**self._head, "status": "in_progress"}

    def finished(self) -> dict[str, Any]:
        """The response when its last token has come."""
        told = {**self._head, "output": self.output.items, "usage": self._usage()}
        if self._finish is FinishReason.LENGTH:
            return {**told, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**told, "status": "completed", "completed_at": int(time.time())}

    def failed(self, error: BatonError) -> dict[str, Any]:
        """The response of a stream that fails."""
        code = "invalid_prompt" if isinstance(error, UserError) else "server_error"
        code = "rate_limit_exceeded" if to_http(error).status == 429 else code
        told = {**self._head, "status": "failed", "output": self.output.items}
        return {**told, "error": {"code": code, "message": str(error)}}

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._prompt_tokens, self._counts.output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._counts.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._parts.reasoning_tokens},
            "total_tokens": prompt + output,
        }


class ResponseEvents(EventQueue):
    """A response's events, numbered from 0. Implements StreamedAnswer."""

    def __init__(self, draft: ResponseDraft, keep: Keep) -> None:
        super().__init__()
        self._draft = draft
        self._keep = keep
        self._number = -1  # of the last event

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add the events of one delta."""
        self._begin()
        for event in self._draft.add(choice, text, delta):
            self.put(self._numbered(event))

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Never called: these events have no ids, so no client has a place to go on from."""
        raise AssertionError((choice, text, delta))

    def end(self, _: Generation) -> bytes:
        """The last event has the whole response. It is kept before its client can ask for it."""
        response = self._draft.finished()
        self._keep(response, self._draft.output)
        self.put(self._numbered({"type": f"response.{response['status']}", "response": response}))
        return self.take()

    def failure(self, error: BatonError) -> bytes:
        self._begin()
        self.put(self._numbered({"type": "response.failed", "response": self._draft.failed(error)}))
        return self.take()

    def _begin(self) -> None:
        if self._number < 0:
            for kind in ("response.created", "response.in_progress"):
                self.put(self._numbered({"type": kind, "response": self._draft.unfinished()}))

    def _numbered(self, event: Event) -> bytes:
        self._number += 1
        data = encode_event({**event, "sequence_number": self._number})
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def _head(response_id: str, body: ResponseBody, submission: Submission) -> dict[str, Any]:
    sampling = submission.sampling
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    reasoning = body.reasoning.model_dump(exclude_none=True) if body.reasoning is not None else {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(submission.arrived_ns / 1e9),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": submission.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key or None,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "safety_identifier": body.safety_identifier,
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"],
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user or None,
    }
