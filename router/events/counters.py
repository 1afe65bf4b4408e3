"""EventCounters: what the event plane has seen, and what it complains of, at a rate that a log can bear."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from wire.events import UnreadKind

log = logging.getLogger("router.events.event_plane")

_SAY_AGAIN_S = 10.0


@dataclass(slots=True)
class EventCounters:
    """Written by the event plane's thread; each number may be read from any."""

    batches: int = 0
    bad_events: Counter[UnreadKind] = field(default_factory=Counter)  # by what is wrong; "batch": a whole one
    gaps: int = 0  # batches were missing and asked for
    snapshots: int = 0  # a worker's pages replaced by a snapshot
    resets: int = 0  # a worker's pages forgotten because what was missing could not be had
    restarts: int = 0  # a publisher that began anew at the same address
    # By worker and kind: when the log last named one, and the count then.
    _said: dict[tuple[str, UnreadKind], tuple[float, int]] = field(default_factory=dict)

    @property
    def bad_events_total(self) -> int:
        """Of every kind."""
        return self.bad_events.total()

    def bad(self, worker: str, kind: UnreadKind, reason: str) -> None:
        """Count what could not be used. The log names the first of a worker and kind in every 10 seconds."""
        self.bad_events[kind] += 1
        now = time.monotonic()
        at, before = self._said.get((worker, kind), (-_SAY_AGAIN_S, self.bad_events[kind] - 1))
        if now - at >= _SAY_AGAIN_S:
            more = self.bad_events[kind] - before - 1
            log.warning("worker %s: %s event: %s (%d more since the last report)", worker, kind, reason, more)
            self._said[worker, kind] = (now, self.bad_events[kind])

    def forget(self, worker: str) -> None:
        """A worker is gone: what was said of it need not be remembered."""
        self._said = {key: said for key, said in self._said.items() if key[0] != worker}
