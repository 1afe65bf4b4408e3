"""DecodeRoom: a room on its decode worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.receiver import KVReceiver
from wire.holds import Hold
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
    is_move: bool = False  # `prefill` is the decode worker on which the room's older epoch runs
    moving_to: str | None = None  # the mailbox of the decode worker that will take this room over

    moves_over: int = 0  # moves in this epoch and in older ones have ended, or will not begin

    @property
    def peers(self) -> tuple[str, ...]:
        partner = self.moving_to if self.hold is DecodeHold.SCHEDULER else self.prefill
        return (self.router,) if partner is None else (self.router, partner)

    def page_holds(self, holder: str, now: float) -> list[Hold]:
        """The reserved pages, which the sender may write, and its writes in progress."""
        if self.receiver is None or self.hold is not DecodeHold.WAITING:
            return []
        writes = [("open pages", self.receiver.opened_at)]
        writes += [(f"grant, {grant.backend}", grant.since) for grant in self.receiver.grants]
        owner = self.prefill or ""
        return [Hold(holder, what, owner, self.room, self.epoch, now - since) for what, since in writes]
