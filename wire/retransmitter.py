"""Retransmitter: repeats a message until it is answered, for a bounded time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wire.holds import Hold
from wire.messages.any_message import AnyMessage


class RetransmitKey(NamedTuple):
    """What an answer names. `to`, a mailbox address, is part of it: routers may use equal room numbers."""

    to: str
    room: int
    epoch: int
    kind: str


@dataclass(slots=True)
class _Pending:
    message: AnyMessage
    next_at: float
    deadline: float
    interval: float
    since: float


class Retransmitter:
    """Messages that await a Receipt. One owner, one thread; time is passed in, so tests need no clock.

    Intervals double from `first_interval_s` up to 2 s: a lost message is soon repeated, and a slow peer is
    not flooded.
    """

    def __init__(self, send: Callable[[str, AnyMessage], None], first_interval_s: float = 0.25) -> None:
        self._send = send
        self._first_interval_s = first_interval_s
        self._pending: dict[RetransmitKey, _Pending] = {}
        self._by_room: dict[tuple[int, int], set[RetransmitKey]] = {}  # (room, epoch) -> keys of _pending
        self.swept = 0  # messages given up

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def receivers(self) -> set[str]:
        """The mailboxes for which messages are repeated."""
        return {key.to for key in self._pending}

    def __contains__(self, key: RetransmitKey) -> bool:
        """Whether a message is being repeated."""
        return key in self._pending

    def say(self, key: RetransmitKey, message: AnyMessage, now: float, timeout_s: float) -> None:
        """Send now, and again until `answered` or `timeout_s` has passed."""
        self._pending[key] = _Pending(
            message, now + self._first_interval_s, now + timeout_s, self._first_interval_s, now
        )
        self._by_room.setdefault((key.room, key.epoch), set()).add(key)
        self._send(key.to, message)

    def answered(self, key: RetransmitKey) -> bool:
        """Stop repeating. False when nothing was pending (a repeated answer)."""
        if self._pending.pop(key, None) is None:
            return False
        of_room = self._by_room[key.room, key.epoch]
        of_room.discard(key)
        if not of_room:
            del self._by_room[key.room, key.epoch]
        return True

    def unanswered(self, holder: str, now: float) -> list[Hold]:
        """The messages that `holder` repeats."""
        return [
            Hold(
                holder, f"message, {key.kind}", key.to, key.room, key.epoch,
                now - pending.since, pending.deadline - now,
            )
            for key, pending in self._pending.items()
        ]  # fmt: skip

    def forget_room(self, room: int, epoch: int) -> None:
        """Stop repeating everything about a room's epoch."""
        for key in self._by_room.pop((room, epoch), ()):
            del self._pending[key]

    def tick(self, now: float) -> list[RetransmitKey]:
        """Send what is due. Returns the keys given up: their deadline passed without an answer."""
        given_up = []
        for key, pending in list(self._pending.items()):
            if now >= pending.deadline:
                self.answered(key)
                given_up.append(key)
                self.swept += 1
            elif now >= pending.next_at:
                pending.interval = min(2.0, pending.interval * 2)
                pending.next_at = now + pending.interval
                self._send(key.to, pending.message)
        return given_up
