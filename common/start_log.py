"""What a process says while it starts: where the time goes, and what it will compute with.

Lines at INFO of one logger. `baton serve` shows those of its workers (cluster/start_notes.py); elsewhere they
are shown where logging shows INFO.
"""

from __future__ import annotations

import logging
import time

start_log = logging.getLogger("baton.start")

_STEP = 0.1  # share of the work between two lines
_STEP_S = 1.0


class StartProgress:
    """Says how much of some bytes is done, at most once a second and for each tenth."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total = max(total_bytes, 1)
        self._done = 0
        self._said_share = 0.0
        self._said_at = time.monotonic()

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        share, now = min(self._done / self._total, 1.0), time.monotonic()
        if share >= self._said_share + _STEP and now >= self._said_at + _STEP_S:
            self._said_share, self._said_at = share, now
            start_log.info("%s: %.0f%% of %s", self._what, 100 * share, gigabytes(self._total))


def gigabytes(nbytes: int) -> str:
    """As people read it: 1.19 GB."""
    return f"{nbytes / 1e9:.3g} GB"
