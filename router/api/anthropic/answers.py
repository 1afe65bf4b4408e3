"""Messages as answers: whole ones, and streams of Anthropic's events."""

from __future__ import annotations

from typing import Any

from common.errors import BatonError
from router.api.answer_parts import AnswerParts
from router.api.anthropic.errors import anthropic_error
from router.api.anthropic.output import Event, MessageBlocks
from router.api.event_json import encode_event
from router.api.event_queue import EventQueue
from router.streams.generation import ChoiceCounts, Generation, Submission
from wire.request import FinishReason, OutputDelta

_ID_PREFIX = "msg_"


class MessageDraft:
    """A message while it grows: its blocks and counts, and why it ended."""

    def __init__(self, submission: Submission, parts: AnswerParts, cut: bool) -> None:
        """`cut`: the context left fewer tokens than were asked for."""
        self._submission = submission
        self._parts = parts
        self._cut = cut
        self._blocks = MessageBlocks()
        self._counts = ChoiceCounts(0)
        self._finish: FinishReason | None = None
        self._matched: str | int | None = None

    def add(self, counts: ChoiceCounts, text: str, delta: OutputDelta) -> list[Event]:
        """Add one delta."""
        parts = self._parts.take(text, delta)
        events = list(self._blocks.add(parts, delta.finish is FinishReason.LENGTH))
        self._counts, self._finish, self._matched = counts, delta.finish, delta.matched
        return events + (list(self._blocks.close()) if delta.finish is not None else [])

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message with this content."""
        return {
            "id": _ID_PREFIX + self._submission.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._submission.model,
            "content": content,
            **self.ending(),
            "usage": self.usage(),
        }

    def whole(self) -> dict[str, Any]:
        """The message, of which nobody was told before."""
        return self.message(self._blocks.whole)

    def usage(self) -> dict[str, Any]:
        """Here input tokens are those that were computed; cached ones are counted beside them."""
        cached = self._counts.cached_tokens
        return {
            "input_tokens": len(self._submission.prompts[0]) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._counts.output_tokens,
        }

    def ending(self) -> dict[str, Any]:
        """Why the message ended, if it has."""
        sequence = self._matched if isinstance(self._matched, str) else None
        reason = None
        if self._finish is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._cut else "max_tokens"
        elif self._finish is FinishReason.STOP:
            reason = "end_turn" if sequence is None else "stop_sequence"
            reason = "tool_use" if self._blocks.calls else reason
        return {"stop_reason": reason, "stop_sequence": sequence}


class MessageEvents(EventQueue):
    """One message's events: each of its blocks starts, grows and stops. Implements StreamedAnswer."""

    waiting = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, draft: MessageDraft) -> None:
        super().__init__()
        self._draft = draft
        self._begun = False

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add the events of one delta."""
        events = self._draft.add(choice, text, delta)
        if not self._begun:
            self._begun = True
            unfinished = {"stop_reason": None, "stop_sequence": None}
            self._put({"type": "message_start", "message": self._draft.message([]) | unfinished})
        for event in events:
            self._put(event)

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Never called: these events have no ids, so no client has a place to go on from."""
        raise AssertionError((choice, text, delta))

    def end(self, _: Generation) -> bytes:
        """What follows the last token: why the message ended, and what it took."""
        self._put({"type": "message_delta", "delta": self._draft.ending(), "usage": self._draft.usage()})
        self._put({"type": "message_stop"})
        return self.take()

    def failure(self, error: BatonError) -> bytes:
        return b"event: error\ndata: " + encode_event(anthropic_error(error)) + b"\n\n"

    def _put(self, event: Event) -> None:
        self.put(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_event(event)))
