"""WorkerMail: what the router says to workers about its rooms."""

from __future__ import annotations

import time
from collections.abc import Callable

from wire.holds import Hold
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Abort, Ack
from wire.retransmitter import RetransmitKey, Retransmitter

ACK_EVERY_S = 0.25
"""Acknowledgements let workers forget, which can wait. With every tick of the router they woke both processes
about as often as tokens do."""


class WorkerMail:
    """Messages, repeated until answered, and acknowledgements of tokens. Implements RoomMail.

    Acknowledgements are cumulative, so they are gathered, and sent with one of the next ticks.
    """

    def __init__(self, send: Callable[[str, AnyMessage], None], receipt_timeout_s: float) -> None:
        """A message that is not answered within `receipt_timeout_s` is given up."""
        self.send = send
        self._retransmitter = Retransmitter(send)
        self._receipt_timeout_s = receipt_timeout_s
        self._acks: dict[str, dict[tuple[int, int], int]] = {}  # by address, then by room and epoch
        self._acked_at = float("-inf")

    def say(self, key: RetransmitKey, message: AnyMessage) -> None:
        """Send a message until it is answered."""
        self._retransmitter.say(key, message, time.monotonic(), self._receipt_timeout_s)

    def dismiss(self, to: str, room: int, epoch: int) -> None:
        """A worker goes on with an epoch that is over: it was cut off when it was told so."""
        key = RetransmitKey(to, room, epoch, "abort")
        if key not in self._retransmitter:
            self.say(key, Abort(room, epoch, "the epoch is over"))

    def answered(self, key: RetransmitKey) -> None:
        """Stop repeating a message."""
        self._retransmitter.answered(key)

    def acknowledge(self, to: str, room: int, epoch: int, upto: int) -> None:
        """A worker may forget a room's tokens below position `upto`."""
        acks = self._acks.setdefault(to, {})
        key = (room, epoch)
        acks[key] = max(upto, acks.get(key, 0))

    def unanswered(self, holder: str, now: float) -> list[Hold]:
        """The messages that `holder`, this router, repeats."""
        return self._retransmitter.unanswered(holder, now)

    def tick(self, now: float) -> list[RetransmitKey]:
        """Repeat what is unanswered, and acknowledge. Returns the keys of messages given up."""
        given_up = self._retransmitter.tick(now)
        if now - self._acked_at < ACK_EVERY_S:
            return given_up
        self._acked_at = now
        for address, upto in self._acks.items():
            self.send(address, Ack([(room, epoch, end) for (room, epoch), end in upto.items()]))
        self._acks.clear()
        return given_up
