"""Unanswered: which peers have been asked something and have sent nothing at all since.

A worker answers every question from its engine loop, between two steps. Suppose that it answers heartbeats,
and that its loop turns according to the directory, but that nothing comes from it. Then it cannot reach this
router: a firewall may let connections pass in one direction only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wire.messages.any_message import AnyMessage
from wire.messages.caches import Inspect
from wire.messages.rooms import Abort, Decode, Prefill, Resend

_QUESTIONS = (Prefill, Decode, Abort, Resend, Inspect)
_SILENT_S = 5.0
_TRY_AGAIN_S = 60.0
_OWN_GAP_S = 1.0  # between two looks


class Unanswered:
    """In front of a mailbox's `send`. Any mail of a peer counts as an answer."""

    def __init__(self, send: Callable[[str, AnyMessage], None]) -> None:
        self._send = send
        self._asked_at: dict[str, float] = {}  # by address: the first question since the peer was heard
        self._looked_at = time.monotonic()

    def send(self, to: str, message: AnyMessage) -> None:
        """Send, and note the time if an answer must come."""
        if isinstance(message, _QUESTIONS) and to not in self._asked_at:
            self._asked_at[to] = time.monotonic()
        self._send(to, message)

    def heard(self, address: str) -> None:
        """Mail has come from there."""
        self._asked_at.pop(address, None)

    def silent(self, now: float) -> list[str]:
        """The peers that were asked over 5 s ago and have sent nothing since.

        Call it in every tick. After a minute a peer is forgotten, so that it is tried again.
        """
        if now - self._looked_at > _OWN_GAP_S:  # this process was blocked: answers may wait in sockets
            self._asked_at = dict.fromkeys(self._asked_at, now)
        self._looked_at = now
        waited = [(address, now - at) for address, at in self._asked_at.items() if now - at >= _SILENT_S]
        for address, seconds in waited:
            if seconds >= _TRY_AGAIN_S:
                del self._asked_at[address]
        return [address for address, seconds in waited if seconds < _TRY_AGAIN_S]
