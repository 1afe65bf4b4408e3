"""What a router says about its rooms at /debug/rooms."""

from __future__ import annotations

import msgspec

from wire.messages.rooms import RoomStatus
from wire.records import WorkerRecord


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker of a room's epoch, and what it said last when it was asked about the room."""

    id: str
    role: str
    stage: str  # "": it was not asked, because tokens came
    place: int  # requests ahead of it, in the queue of that stage
    waits_for: str  # mailbox of the worker that must act; "": this one
    said_s_ago: float

    @classmethod
    def of(cls, worker: WorkerRecord, status: RoomStatus | None, said_s_ago: float) -> WorkerReport:
        """A report of what a worker said `said_s_ago` seconds ago, if anything."""
        if status is None:
            return cls(worker.id, worker.role, "", 0, "", 0.0)
        return cls(worker.id, worker.role, status.stage, status.place, status.waits_for, round(said_s_ago, 3))


class RoomReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where a room is. Without workers it waits: for its turn, or for a worker."""

    room: int
    request_id: str
    epoch: int
    tokens: int  # of its output
    why: str  # what ended its last epoch, while it has no workers
    workers: list[WorkerReport]
