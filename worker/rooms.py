"""Rooms: which room runs on this worker in which epoch, which are over, and what arrived too early.

    unknown --start--> active --end--> tombstone --lease ends--> unknown

A tombstone refuses messages of its epoch and older ones, so a repeated or reordered message cannot start a
finished room again. A hand-off message for a room that has not started here is parked under a lease: the
router's messages to prefill and to decode may arrive after the workers' own.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, Protocol, TypeVar

from wire.holds import Hold
from wire.messages.any_message import AnyMessage


class StartVerdict(Enum):
    """What a start message is to this worker."""

    NEW = "new"
    REPEATED = "repeated"
    STALE = "stale"


class HasEpoch(Protocol):
    """What Rooms needs of a room."""

    @property
    def room(self) -> int: ...
    @property
    def epoch(self) -> int: ...


RoomState = TypeVar("RoomState", bound=HasEpoch)


class Rooms(Generic[RoomState]):
    """The registry of rooms. Used by the engine loop only; time is passed in."""

    def __init__(self, tombstone_s: float, parking_s: float) -> None:
        self._tombstone_s = tombstone_s
        self._parking_s = parking_s
        self._active: dict[int, RoomState] = {}
        self._tombstones: dict[int, tuple[int, float]] = {}  # room -> (epoch, forgotten at)
        self._parked: dict[tuple[int, int], tuple[str, AnyMessage, float]] = {}
        self.swept = 0  # parked messages whose room did not start

    def __len__(self) -> int:
        return len(self._active)

    def active(self) -> list[RoomState]:
        """All active rooms, oldest first."""
        return list(self._active.values())

    def admission(self, room: int, epoch: int) -> StartVerdict:
        """Whether a start message for (room, epoch) is new, a repeat, or too late."""
        if self._buried(room, epoch):
            return StartVerdict.STALE
        current = self._active.get(room)
        if current is None or current.epoch < epoch:
            return StartVerdict.NEW
        return StartVerdict.REPEATED if current.epoch == epoch else StartVerdict.STALE

    def start(self, state: RoomState) -> None:
        """Add a room. Its older epoch must have been ended before."""
        assert self.admission(state.room, state.epoch) is StartVerdict.NEW
        assert state.room not in self._active
        self._active[state.room] = state

    def get(self, room: int, epoch: int | None = None) -> RoomState | None:
        """The active room, if it runs in that epoch (None: in any)."""
        state = self._active.get(room)
        return state if state is not None and epoch in (None, state.epoch) else None

    def end(self, room: int, epoch: int, now: float) -> RoomState | None:
        """Leave a tombstone for (room, epoch) and all older epochs. Returns the room if it was active."""
        buried, _ = self._tombstones.get(room, (0, 0.0))
        self._tombstones[room] = (max(buried, epoch), now + self._tombstone_s)
        for key in [key for key in self._parked if key[0] == room and key[1] <= epoch]:
            del self._parked[key]
        state = self._active.get(room)
        if state is None or state.epoch > epoch:
            return None
        return self._active.pop(room)

    def park(self, room: int, epoch: int, sender: str, message: AnyMessage, now: float) -> bool:
        """Keep a message for a room that has not started here. False if there is a tombstone: refuse it."""
        if self._buried(room, epoch):
            return False
        first = self._parked.get((room, epoch))  # a repeat does not extend the lease
        until = now + self._parking_s if first is None else first[2]
        self._parked[room, epoch] = (sender, message, until)
        return True

    def unpark(self, room: int, epoch: int) -> tuple[str, AnyMessage] | None:
        """Take the (sender, message) that was parked for a room."""
        parked = self._parked.pop((room, epoch), None)
        return None if parked is None else parked[:2]

    def sweep(self, now: float) -> None:
        """Forget tombstones whose lease is over."""
        for room, (_, forgotten_at) in list(self._tombstones.items()):
            if now >= forgotten_at:
                del self._tombstones[room]

    def take_unclaimed(self, now: float) -> list[tuple[str, AnyMessage]]:
        """Forget the parked messages whose lease is over, and return each with its sender."""
        late = [key for key, (_, _, expires_at) in self._parked.items() if now >= expires_at]
        self.swept += len(late)
        return [self._parked.pop(key)[:2] for key in late]

    def parked(self, holder: str, now: float) -> list[Hold]:
        """The messages that wait for their room to start at `holder`."""
        return [
            Hold(holder, "parked message", sender, room, epoch, now - until + self._parking_s, until - now)
            for (room, epoch), (sender, _, until) in self._parked.items()
        ]

    def _buried(self, room: int, epoch: int) -> bool:
        tombstone = self._tombstones.get(room)
        return tombstone is not None and epoch <= tombstone[0]
