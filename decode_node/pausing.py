"""DecodePausing: what a decode worker can pause, and what another router can go on with."""

from __future__ import annotations

from typing import Any

from decode_node.room import DecodeHold, DecodeRoom
from worker.orphans import Pausing


class DecodePausing(Pausing):
    """Rooms that the scheduler has. The others wait for KV, and their router may have died before it started
    prefill. A room on its way to another worker is not claimed: its next epoch there has the dead router.
    """

    def pause(self, room: Any) -> bool:
        assert isinstance(room, DecodeRoom)
        return room.hold is DecodeHold.SCHEDULER and self.scheduler.hand_off.pause(room.req)

    def go_on(self, room: Any) -> None:
        self.scheduler.hand_off.resume(room.req)

    def can_be_claimed(self, room: Any) -> bool:
        assert isinstance(room, DecodeRoom)
        return room.hold is DecodeHold.SCHEDULER and room.moving_to is None
