"""DecodePausing: what a decode worker can pause, and what another router can go on with."""

from __future__ import annotations

from typing import Any

from decode_node.room import DecodeHold, DecodeRoom
from worker.orphans import Pausing

_EPOCHS_OF_A_ROUTER = 1000  # more moves than a router can begin of which this worker has not heard


class DecodePausing(Pausing):
    """Rooms that the scheduler has. The others wait for KV, and their router may have died before it started
    prefill. A room on its way to another worker is not claimed: its next epoch there has the dead router.
    """

    def pause(self, room: Any) -> bool:
        assert isinstance(room, DecodeRoom)
        if room.hold is not DecodeHold.SCHEDULER or room.moving_to is not None:
            return False  # its move pauses it, and needs no router
        return self.scheduler.hand_off.pause(room.req)

    def go_on(self, room: Any) -> None:
        self.scheduler.hand_off.resume(room.req)

    def can_be_claimed(self, room: Any) -> bool:
        assert isinstance(room, DecodeRoom)
        return room.hold is DecodeHold.SCHEDULER and room.moving_to is None

    def claimed(self, room: Any) -> None:
        """Moves that the first router has begun are over, also those of which nothing has come here."""
        assert isinstance(room, DecodeRoom)
        room.moves_over = self.newest_epoch(room) + _EPOCHS_OF_A_ROUTER

    def newest_epoch(self, room: Any) -> int:
        assert isinstance(room, DecodeRoom)
        return max(room.epoch, room.moves_over)
