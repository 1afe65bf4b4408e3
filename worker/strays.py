"""Strays: messages about a room from processes that have no part in it."""

from __future__ import annotations

import logging

from common.quiet_log import QuietLog
from wire.messages.base import RoomMessage, kind_of

log = logging.getLogger(__name__)


class Strays:
    """They are not answered, and change nothing: only a mistake or a lie sends them."""

    def __init__(self) -> None:
        self._quiet = QuietLog(log)

    def note(self, sender: str, message: RoomMessage) -> None:
        """Log a message."""
        self._quiet.warning("room %d: %s has no say in it: %s", message.room, sender, kind_of(message))
