"""WorkerRole: what a role adds to a worker. prefill_node and decode_node implement one each.

The worker (worker/loop.py) owns the loop and what every role needs. The role owns its side of the hand-off.
Everything here runs on the engine loop's thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill
from scheduler.req import Req
from wire.holds import Hold
from wire.mailbox import Mail
from wire.messages.base import kind_of
from wire.messages.rooms import (
    Decode,
    FetchSource,
    Prefill,
    Rejected,
    RejectKind,
    Reserved,
    RoomStatus,
    Timeline,
)
from wire.peer_monitors import PeerState
from wire.records import Role
from wire.request import OutputDelta
from wire.retransmitter import RetransmitKey
from wire.stages import now_ns
from worker.fetching import Fetching
from worker.lending import Lending
from worker.orphans import Orphans, Pausing
from worker.outbox import OutputKey
from worker.rooms import Rooms
from worker.services import Services
from worker.strays import Strays

_TELL_S = 10.0  # a router that has confirmed nothing by then has asked again itself, or is gone


@dataclass(slots=True)
class Room:
    """A room as this worker knows it. Roles extend it with their side of the hand-off."""

    req: Req
    router: str  # mailbox address
    key: OutputKey = field(init=False)
    source: FetchSource | None = field(init=False, default=None)  # who has a part of the prompt's KV

    def __post_init__(self) -> None:
        self.key = OutputKey(self.req.room, self.req.epoch)

    @property
    def room(self) -> int:
        return self.key.room

    @property
    def epoch(self) -> int:
        return self.key.epoch

    @property
    def forced_tokens(self) -> int:
        """Output tokens that were given with the start of the room's epoch."""
        return len(self.req.request.forced)

    @property
    def peers(self) -> tuple[str, ...]:
        """The mailboxes that must be up for the room to go on here."""
        return (self.router,)

    def page_holds(self, holder: str, now: float) -> list[Hold]:  # noqa: ARG002 - for overriders
        """The room's pages that `holder`, this worker, lets another process write."""
        return []


RoomType = TypeVar("RoomType", bound=Room)


class WorkerRole(ABC, Generic[RoomType]):
    """One role's part of a worker, and its scheduler's NodePolicy."""

    name: ClassVar[Role]
    phases: ClassVar[frozenset[Phase]]
    reserves: ClassVar[bool]  # rows are kept for requests whose KV is still arriving
    accepts: ClassVar[type[Prefill] | type[Decode]]
    pausing: ClassVar[type[Pausing]] = Pausing

    def __init__(self, services: Services) -> None:
        self.worker_id = services.worker_id
        self.options = services.options
        self.memory = services.memory
        self.transfer = services.transfer
        self.mailbox = services.mailbox
        self.retransmitter = services.retransmitter
        self.questions = services.questions
        self.outbox = services.outbox
        self.rooms: Rooms[RoomType] = services.rooms
        self.waiting: Sized = ()  # for memory, outside the scheduler, which does not count them
        self.strays = Strays()
        self.scheduler = services.build_scheduler(self)
        self.fetching = Fetching(services, self.scheduler)
        self.lending = Lending(services, self.scheduler, second_chances=self.name == "decode")
        self.orphans: Orphans[RoomType] = Orphans(
            self,
            self.pausing(self.scheduler),
            services.rooms,
            services.outbox,
            services.options.resume_grace_s,
        )

    # -- what a role must implement ------------------------------------------------------------------

    @abstractmethod
    def make_room(self, router: str, req: Req, message: Any) -> RoomType:
        """The room of a start message, which is an instance of `accepts`. Nothing else happens yet."""

    @abstractmethod
    def begin(self, room: RoomType, now: float) -> None:
        """The room is registered now: give its request to the scheduler, at once or later."""

    @abstractmethod
    def handle(self, mail: Mail) -> None:
        """Act on a KV-control message."""

    @abstractmethod
    def abandon(self, room: RoomType) -> None:
        """Release everything that the room holds. It is not registered any more."""

    @abstractmethod
    def poll(self, now: float) -> None:
        """Advance hand-offs. Called in every turn of the loop; must not block."""

    @abstractmethod
    def sweep(self, now: float) -> None:
        """End rooms that have waited too long. Called a few times a second."""

    @abstractmethod
    def on_prefilled(self, req: Req) -> AfterPrefill:
        """See NodePolicy: hand the request off, or let it decode here."""

    @abstractmethod
    def backends(self) -> tuple[str, ...]:
        """Names of this worker's transfer backends, best first, for its record."""

    @abstractmethod
    def close(self) -> None:
        """Close what the role owns. The loop has ended."""

    @property
    def busy(self) -> bool:
        """Whether something other than a room must end before the worker may leave."""
        return self.fetching.busy or len(self.lending) > 0

    # -- what is the same in every role --------------------------------------------------------------

    def on_peer(self, address: str, state: PeerState, is_lost: bool) -> None:
        """A mailbox to which this worker is connected has come up or gone down, or is so still: a router's or
        a worker's. `is_lost`: it was not known to be down, and what is being written there is in vain."""
        now = time.monotonic()
        if is_lost:
            self.transfer.on_lost(address)
            self.lending.on_lost(address)
        elif state is PeerState.UP:
            self.transfer.on_up(address)
        self.questions.on_peer(address, state, now)
        self.fetching.on_peer(address, state, now)
        self.orphans.on_peer(address, state, now)

    def on_chunk(self, req: Req) -> None:
        """See NodePolicy. A role that sends pages while a prompt is computed overrides it."""

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """See NodePolicy: queue the output for the room's router, and end the room with its last token."""
        room = self.rooms.get(req.room, req.epoch)
        assert room is not None, "the scheduler only runs rooms that are registered"
        self.outbox.push(room.router, room.key, start, delta, req.cached_tokens, req.request.forced)
        if delta.finish is not None:
            self.end(room)

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        """See NodePolicy: give the room back to its router."""
        room = self.rooms.get(req.room, req.epoch)
        if room is not None:
            self.fail(room, why, message)

    def end(self, room: RoomType) -> None:
        """The room's work on this worker is done: leave a tombstone and send its part of the timeline."""
        now = time.monotonic()
        self.rooms.end(room.room, room.epoch, now)
        self.outbox.retire(room.key, now)
        self.tell_router(room, self.timeline(room))

    def timeline(self, room: RoomType) -> Timeline:
        """The stages of the room on this worker, for the router's trace."""
        req = room.req
        return Timeline(
            req.room, req.epoch, self.worker_id, req.stamps, ended_ns=now_ns(), cached_from=req.cached_from
        )

    def status(self, room: RoomType) -> RoomStatus:
        """Where a room is of which the router has heard nothing for a while."""
        req = room.req
        waits_for = self.questions.waits_for(room.key)
        return RoomStatus(room.room, room.epoch, req.stage, self.scheduler.place(req), waits_for)

    def tell_router(self, room: RoomType, message: Reserved | Rejected | Timeline) -> None:
        """Send a message to the room's router, and again until the router confirms it."""
        key = RetransmitKey(room.router, message.room, message.epoch, kind_of(message))
        self.retransmitter.say(key, message, time.monotonic(), _TELL_S)

    def fail(self, room: RoomType, why: RejectKind, message: str, blamed: str = "") -> None:
        """Tell the room's router that it ends here without a result, and release what it holds.

        `blamed` is the other worker's mailbox if that one did not do its part.
        """
        self.rooms.end(room.room, room.epoch, time.monotonic())
        self.retransmitter.forget_room(room.room, room.epoch)
        self.questions.end(room.key)
        self.outbox.discard(room.key)
        self.tell_router(room, Rejected(room.room, room.epoch, why, message, blamed=blamed))
        self.abandon(room)
