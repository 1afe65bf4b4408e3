"""DecodeRoom: a room on its decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.receiver import KVReceiver
from worker.role import Room


class DecodeHold(StrEnum):
    """Who holds the request."""

    BOOTSTRAP = "bootstrap"  # waits for pages to be reserved; holds nothing
    WAITING = "waiting"  # pages are reserved; the KV is on its way
    SCHEDULER = "scheduler"  # it waits for a batch, or is in one


@dataclass(slots=True)
class DecodeRoom(Room):
    """`prefill` is None when this worker prefills itself."""

    prefill: str | None
    hold: DecodeHold
    receiver: KVReceiver | None = None
    kv_bytes: int = 0

    @property
    def peers(self) -> tuple[str, ...]:
        if self.prefill is None or self.hold is DecodeHold.SCHEDULER:
            return (self.router,)
        return (self.router, self.prefill)
