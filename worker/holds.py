"""What a worker holds for others (docs/decisions/0022-holds.md)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from wire.holds import Hold, HoldReport
from worker.outbox import OutputKey
from worker.services import Services


class QuarantineOwner(NamedTuple):
    """Whose write may still reach pages in quarantine."""

    key: OutputKey  # the room and epoch for which they were reserved
    sender: str  # a mailbox


def hold_report(services: Services, now: float, peers: Iterable[Hold]) -> HoldReport:
    """Everything that the worker holds at `now`, a monotonic time, and what it has swept so far. `peers`:
    what it holds for fetches."""
    holds = [
        *peers,
        *_rooms(services, now),
        *services.rooms.parked(services.worker_id, now),
        *services.outbox.unacknowledged(now),
        *services.retransmitter.unanswered(services.worker_id, now),
        *_quarantine(services, now),
        *services.mailbox.connections(services.worker_id, now),
    ]
    return HoldReport(holds, swept_holds(services))


def swept_holds(services: Services) -> dict[str, int]:
    """How many holds were given up at their deadline so far, by kind. May be called from any thread."""
    return {
        "parked message": services.rooms.swept,
        "output": services.outbox.swept,
        "message": services.retransmitter.swept,
    }


def _rooms(services: Services, now: float) -> Iterator[Hold]:
    """A room is its router's. When the router is gone, it is paused, and given up after `resume_grace_s`."""
    now_ns = time.time_ns()
    for room in services.rooms.active():
        stamps = room.req.stamps
        what = f"room, {stamps[-1].stage}" if stamps else "room"
        age_s = (now_ns - stamps[0].at_ns) / 1e9 if stamps else None
        yield Hold(services.worker_id, what, room.router, room.room, room.epoch, age_s)
        yield from room.page_holds(services.worker_id, now)


def _quarantine(services: Services, now: float) -> Iterator[Hold]:
    """It has no deadline: only the transport's fence proves that nothing is written any more."""
    for owner, since in services.memory.quarantine_owners():
        assert isinstance(owner, QuarantineOwner), "worker/quarantine.py names the owner of its pages"
        yield Hold(services.worker_id, "quarantine", owner.sender, *owner.key, now - since)
