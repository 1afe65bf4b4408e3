"""EventCounters: counts what the event plane has seen, and logs bad events at a limited rate."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from wire.events import UnreadKind

log = logging.getLogger("router.events.event_plane")

_LOG_EVERY_S = 10.0


@dataclass(slots=True)
class EventCounters:
    """Written by the event plane's thread. Any thread may read a number."""

    batches: int = 0
    bad_events: Counter[UnreadKind] = field(default_factory=Counter)  # "batch" counts whole batches
    gaps: int = 0  # batches were missing and requested again
    snapshots: int = 0  # a worker's pages replaced by a snapshot
    resets: int = 0  # a worker's pages forgotten because missing batches could not be replayed
    restarts: int = 0  # a publisher was restarted at the same address
    # By worker and kind: when one was last logged, and the count then.
    _logged: dict[tuple[str, UnreadKind], tuple[float, int]] = field(default_factory=dict)

    @property
    def bad_events_total(self) -> int:
        """The number of bad events of all kinds."""
        return self.bad_events.total()

    def bad(self, worker: str, kind: UnreadKind, reason: str) -> None:
        """Count an event that could not be used. One per worker and kind is logged in 10 seconds."""
        self.bad_events[kind] += 1
        now = time.monotonic()
        at, before = self._logged.get((worker, kind), (-_LOG_EVERY_S, self.bad_events[kind] - 1))
        if now - at >= _LOG_EVERY_S:
            more = self.bad_events[kind] - before - 1
            log.warning("worker %s: %s event: %s (%d more since the last report)", worker, kind, reason, more)
            self._logged[worker, kind] = (now, self.bad_events[kind])

    def forget(self, worker: str) -> None:
        """A worker is gone. Forget when its events were logged."""
        self._logged = {key: logged for key, logged in self._logged.items() if key[0] != worker}
