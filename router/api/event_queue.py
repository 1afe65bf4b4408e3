"""EventQueue: the events of a stream that its client has not been sent."""

from __future__ import annotations

from common.errors import BatonError
from router.api.event_json import encode_event
from router.http_errors import to_http


class EventQueue:
    """Events in order. What a stream's form says otherwise than most, its queue overrides."""

    waiting = b": waiting\n\n"
    """Sent when nothing has come for a while: a comment, which clients pass over. With its blank line it is a
    piece by itself to those that split a stream there."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.unread = 0  # bytes of the events

    def put(self, event: bytes) -> None:
        """Add one event, or several."""
        self.events.append(event)
        self.unread += len(event)

    def take(self) -> bytes:
        """The events that have not been taken yet."""
        events, self.events = self.events, []
        self.unread = 0
        return events[0] if len(events) == 1 else b"".join(events)

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a stream which has begun and fails."""
        return b"event: error\ndata: " + encode_event(to_http(error).body) + b"\n\n"
