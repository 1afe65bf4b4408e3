"""Messages as answers: whole ones, and streams of Anthropic's events."""

from __future__ import annotations

from typing import Any

from common.errors import BatonError
from router.api.anthropic.errors import anthropic_error
from router.api.collection import CollectedChoice
from router.api.event_json import encode_event
from router.api.event_queue import EventQueue
from router.streams.generation import ChoiceCounts, Generation, Submission
from wire.request import FinishReason, OutputDelta

_ID_PREFIX = "msg_"


def whole_message(
    submission: Submission, counts: ChoiceCounts, collected: CollectedChoice, cut: bool
) -> dict[str, Any]:
    """A whole message. `cut`: the context left fewer tokens than were asked for."""
    content = [{"type": "text", "text": collected.text}] if collected.text else []
    return _message(submission, counts, content, _ending(collected.finish, collected.matched, cut))


class MessageEvents(EventQueue):
    """One message's events: each of its blocks starts, grows and stops. Implements StreamedAnswer."""

    waiting = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, submission: Submission, cut: bool) -> None:
        super().__init__()
        self._submission = submission
        self._cut = cut
        self._begun = False
        self._block = -1  # that is open
        self._finish: FinishReason | None = None
        self._matched: str | int | None = None

    def add(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Add the events of one delta."""
        if not self._begun:
            self._begun = True
            message = _message(self._submission, choice, [], _ending(None, None, self._cut))
            self.put(_event("message_start", message=message))
        if text:
            if self._block < 0:
                self._block = 0
                empty = {"type": "text", "text": ""}
                self.put(_event("content_block_start", index=self._block, content_block=empty))
            told = {"type": "text_delta", "text": text}
            self.put(_event("content_block_delta", index=self._block, delta=told))
        self._finish, self._matched = delta.finish, delta.matched

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """Never called: these events have no ids, so no client has a place to go on from."""
        raise AssertionError((choice, text, delta))

    def end(self, generation: Generation) -> bytes:
        """What follows the last token: why the message ended, and what it took."""
        if self._block >= 0:
            self.put(_event("content_block_stop", index=self._block))
        ending = _ending(self._finish, self._matched, self._cut)
        (choice,) = generation.choices
        self.put(_event("message_delta", delta=ending, usage=_usage(self._submission, choice)))
        self.put(_event("message_stop"))
        return self.take()

    def failure(self, error: BatonError) -> bytes:
        return b"event: error\ndata: " + encode_event(anthropic_error(error)) + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_event({"type": kind, **fields}))


def _message(
    submission: Submission, counts: ChoiceCounts, content: list[dict[str, Any]], ending: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": _ID_PREFIX + submission.request_id,
        "type": "message",
        "role": "assistant",
        "model": submission.model,
        "content": content,
        **ending,
        "usage": _usage(submission, counts),
    }


def _usage(submission: Submission, counts: ChoiceCounts) -> dict[str, Any]:
    """Here input tokens are those that were computed; cached ones are counted beside them."""
    return {
        "input_tokens": len(submission.prompts[0]) - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
    }


def _ending(finish: FinishReason | None, matched: str | int | None, cut: bool) -> dict[str, Any]:
    """`matched`: the stop string or the token that ended it."""
    sequence = matched if isinstance(matched, str) else None
    reason = None
    if finish is FinishReason.LENGTH:
        reason = "model_context_window_exceeded" if cut else "max_tokens"
    elif finish is FinishReason.STOP:
        reason = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
