"""Orphans: the rooms of routers that are gone, until another router claims them (docs/resuming.md).

    router down ──a moment──> paused ──grace──> dropped
         ▲                       │
         └──── it is up again, or another router claims the room

A paused room holds its memory and its output, and computes nothing. A client that finds another router within
the grace goes on where it was. A room that cannot be paused yet (it waits for KV, or computes its prompt)
goes on until it can.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Generic, Protocol, TypeVar

from scheduler.scheduler import Scheduler
from wire.messages.rooms import ClaimedRoom, Rejected, RejectKind
from wire.peer_monitors import PeerState
from worker.outbox import Outbox, OutputKey
from worker.rooms import HasEpoch, Rooms

CLAIMED = "another router goes on with this stream"
"""What a router is told that had the room before."""

_PAUSE_AFTER_S = 1.0  # a router that is up again by then has not been missed
_UNCLAIMED_S = 5.0  # the longest that a room of a router that is gone waits for what makes it claimable


class RoutedRoom(HasEpoch, Protocol):
    """A room with its router."""

    router: str  # mailbox address
    key: OutputKey

    @property
    def forced_tokens(self) -> int:
        """Output tokens that were given with the start of the room's epoch."""


RoomState = TypeVar("RoomState", bound=RoutedRoom)
AnyRoom = TypeVar("AnyRoom", bound=RoutedRoom, contravariant=True)


class OrphanHost(Protocol[AnyRoom]):
    """The role whose rooms these are."""

    def fail(self, room: AnyRoom, why: RejectKind, message: str) -> None:
        """Tell the room's router that it is over, and release what it holds."""

    def tell_router(self, room: AnyRoom, message: Rejected) -> None:
        """Send a message to the room's router until it is confirmed."""


class Pausing:
    """Which rooms can wait, and be claimed: none, in a role that does not decode."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def pause(self, room: Any) -> bool:  # noqa: ARG002
        """Compute nothing for the room until `go_on`. False when that is not possible now."""
        return False

    def go_on(self, room: Any) -> None:
        """Compute again for a paused room."""
        raise NotImplementedError

    def can_be_claimed(self, room: Any) -> bool:  # noqa: ARG002
        """Whether the room goes on by itself under another router: it waits for nothing that its router
        started."""
        return False

    def claimed(self, room: Any) -> None:
        """The room has another router now."""
        raise NotImplementedError

    def newest_epoch(self, room: Any) -> int:
        """The newest epoch of the room that any of its routers before this one may have used."""
        raise NotImplementedError


class Orphans(Generic[RoomState]):
    """Used by the engine loop only; time is passed in."""

    def __init__(
        self,
        host: OrphanHost[RoomState],
        pausing: Pausing,
        rooms: Rooms[RoomState],
        outbox: Outbox,
        grace_s: float,
    ) -> None:
        """A router's rooms are dropped when it has been gone for `grace_s`."""
        self._host = host
        self._pausing = pausing
        self._rooms = rooms
        self._outbox = outbox
        self._grace_s = grace_s
        self._gone: dict[str, float] = {}  # router (or another peer) that is down -> since when
        self._paused: dict[OutputKey, RoomState] = {}

    def __len__(self) -> int:
        return len(self._paused)

    def on_peer(self, address: str, state: PeerState, now: float) -> None:
        """A peer of this worker's mailbox has come up or gone down."""
        if state is PeerState.DOWN:
            self._gone.setdefault(address, now)
        elif self._gone.pop(address, None) is not None:
            self._go_on(address)

    def heard(self, address: str, now: float) -> None:
        """A message of a peer has come. If the peer is down, it may be back, or this is the last it said."""
        if address in self._gone:
            self._gone[address] = now
            self._go_on(address)

    def sweep(self, now: float) -> None:
        """Pause and drop what is due."""
        if not self._gone:
            return
        for room in self._rooms.active():
            since = self._gone.get(room.router)
            if since is None:
                continue
            if now - since >= self._kept_s(room):
                self._host.fail(room, RejectKind.UNKNOWN, "its router was gone for too long")
            elif now - since >= _PAUSE_AFTER_S and room.key not in self._paused and self._pausing.pause(room):
                self._paused[room.key] = room
        for address in [one for one, since in self._gone.items() if now - since >= self._grace_s]:
            del self._gone[address]
        for key in [key for key in self._paused if self._rooms.get(*key) is None]:
            del self._paused[key]

    def _kept_s(self, room: RoomState) -> float:
        """How long a room may wait for another router."""
        return self._grace_s if self._pausing.can_be_claimed(room) else min(self._grace_s, _UNCLAIMED_S)

    def claim(self, router: str, numbers: Collection[int]) -> list[ClaimedRoom]:
        """Give these rooms to `router`, whatever epoch they are in. Returns those that are here."""
        claimed = [self._claim(router, number) for number in numbers]
        return [one for one in claimed if one is not None]

    def _claim(self, router: str, number: int) -> ClaimedRoom | None:
        room = self._rooms.get(number)
        if room is None:
            return self._outbox.claim(router, number)  # its output is complete
        if not self._pausing.can_be_claimed(room):
            return None
        if room.router != router:
            self._host.tell_router(room, Rejected(room.room, room.epoch, RejectKind.CLAIMED, CLAIMED))
            room.router = router
            self._pausing.claimed(room)
        self._outbox.claim(router, number)
        if self._paused.pop(room.key, None) is not None:
            self._pausing.go_on(room)
        newest = self._pausing.newest_epoch(room)
        return ClaimedRoom(room.room, room.epoch, room.forced_tokens, newest)

    def _go_on(self, router: str) -> None:
        for room in [room for room in self._paused.values() if room.router == router]:
            del self._paused[room.key]
            if self._rooms.get(*room.key) is room:
                self._pausing.go_on(room)
