"""QuietLog: warnings of which a hostile peer could cause millions."""

from __future__ import annotations

import logging
import time

_EVERY_S = 10.0


class QuietLog:
    """Logs the first warning, and then one every ten seconds with the number of those left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_at = 0.0
        self._left_out = 0

    def warning(self, message: str, *args: object) -> None:
        """Log a warning, or count it."""
        now = time.monotonic()
        if now < self._next_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last one)" if self._left_out else ""
        self._next_at, self._left_out = now + _EVERY_S, 0
        self._log.warning(message + more, *args)
