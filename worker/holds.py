"""What a worker holds for others (docs/decisions/0022-holds.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from wire.holds import Hold, HoldReport
from worker.outbox import OutputKey
from worker.role import Services


def hold_report(services: Services, now: float) -> HoldReport:
    """Everything that the worker holds at `now`, a monotonic time, and what it has swept so far."""
    holds = [
        *_rooms(services),
        *services.rooms.parked(services.worker_id, now),
        *services.outbox.unacknowledged(now),
        *services.retransmitter.unanswered(services.worker_id, now),
        *_quarantine(services),
    ]
    return HoldReport(holds, swept_holds(services))


def swept_holds(services: Services) -> dict[str, int]:
    """How many holds were given up at their deadline so far, by kind. May be called from any thread."""
    return {
        "parked message": services.rooms.swept,
        "output": services.outbox.swept,
        "message": services.retransmitter.swept,
    }


def _rooms(services: Services) -> Iterator[Hold]:
    """A room is its router's. When the router is gone, it is paused, and given up after `resume_grace_s`."""
    now_ns = time.time_ns()
    for room in services.rooms.active():
        stamps = room.req.stamps
        what = f"room, {stamps[-1].stage}" if stamps else "room"
        age_s = (now_ns - stamps[0].at_ns) / 1e9 if stamps else None
        yield Hold(services.worker_id, what, room.router, room.room, room.epoch, age_s)


def _quarantine(services: Services) -> Iterator[Hold]:
    """It has no deadline: only the transport's fence proves that nothing is written any more."""
    for key in services.memory.quarantine_owners():
        assert isinstance(key, OutputKey), "a room's key names its pages"
        yield Hold(services.worker_id, "quarantine", "the room's sender", key.room, key.epoch)
