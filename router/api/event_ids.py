"""EventIds: the ids of a stream's events, from which another router can go on (streams/resume.py)."""

from __future__ import annotations

from collections.abc import Callable

from router.api.event_queue import EventQueue
from router.streams.generation import ChoiceCounts
from router.streams.resume import ChoicePosition


class EventIds:
    """Keeps the positions of a stream's choices."""

    waiting = b": waiting\n"
    """The comment between such events (EventQueue.waiting). After an id some clients, OpenAI's in Python
    among them, take each further blank line for the end of an event, here of an empty one."""

    def __init__(self, sign: Callable[[], str], positions: list[ChoicePosition]) -> None:
        """`positions` are those from which the stream begins. `sign` makes its token when the first event is
        there: only then the version of the model is fixed."""
        self._sign = sign
        self._head = b""
        self._positions = [position.write() for position in positions]
        self._only = len(positions) == 1

    def after(self, choice: ChoiceCounts, finished: bool) -> bytes:
        """The id line of an event that brings a choice to its present count. Call it for every event."""
        if not self._head:
            self._head = b"id: " + self._sign().encode() + b":"
        if self._only and not finished:
            return b"%b%d\n" % (self._head, choice.output_tokens)
        position = ChoicePosition(choice.output_tokens, finished, choice.reasoning_tokens)
        self._positions[choice.index] = position.write()
        return self._head + b".".join(self._positions) + b"\n"


class NoIds(EventIds):
    """For a stream of so many choices that naming all positions would cost more than the events."""

    waiting = EventQueue.waiting

    def __init__(self) -> None:
        super().__init__(str, [])

    def after(self, choice: ChoiceCounts, finished: bool) -> bytes:  # noqa: ARG002
        return b""
