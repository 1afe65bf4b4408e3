"""WorkerRole: what a role adds to a worker. prefill_node and decode_node each implement one.

The worker (worker/loop.py) owns the loop and the things every role has; the role owns the hand-off.
Everything here runs on the engine loop's thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from kvcache.memory import Memory
from scheduler.config import Phase
from scheduler.node_policy import AfterPrefill, NodePolicy
from scheduler.req import Req
from scheduler.scheduler import Scheduler
from wire.mailbox import Mail, Mailbox
from wire.messages import (
    Decode,
    OutputDelta,
    Prefill,
    Rejected,
    RejectKind,
    Reserved,
    Timeline,
    kind_of,
)
from wire.records import Role
from wire.retransmitter import RetransmitKey, Retransmitter
from worker.options import WorkerOptions
from worker.outbox import Outbox, OutputKey
from worker.rooms import Rooms

_TELL_S = 10.0  # a router that confirms nothing for so long asks again itself, or is gone


@dataclass(slots=True)
class Room:
    """A room as this worker knows it. Roles extend it with their side of the hand-off."""

    req: Req
    router: str

    @property
    def room(self) -> int:
        return self.req.room

    @property
    def epoch(self) -> int:
        return self.req.epoch

    @property
    def key(self) -> OutputKey:
        return OutputKey(self.req.room, self.req.epoch)


RoomType = TypeVar("RoomType", bound=Room)


@dataclass(frozen=True, slots=True)
class Services:
    """What a role is given by its worker."""

    worker_id: str
    incarnation: int
    options: WorkerOptions
    memory: Memory
    mailbox: Mailbox
    retransmitter: Retransmitter
    outbox: Outbox
    rooms: Rooms[Any]
    build_scheduler: Callable[[NodePolicy], Scheduler]  # over this worker's engine and memory


class WorkerRole(ABC, Generic[RoomType]):
    """One role's part of a worker, and the scheduler's NodePolicy."""

    name: ClassVar[Role]
    phases: ClassVar[frozenset[Phase]]
    shared_pool: ClassVar[bool]  # KV pages live in memory that another process on this host may map
    accepts: ClassVar[type[Prefill] | type[Decode]]

    def __init__(self, services: Services) -> None:
        self.worker_id = services.worker_id
        self.incarnation = services.incarnation
        self.options = services.options
        self.memory = services.memory
        self.mailbox = services.mailbox
        self.retransmitter = services.retransmitter
        self.outbox = services.outbox
        self.rooms: Rooms[RoomType] = services.rooms
        self.scheduler = services.build_scheduler(self)

    # -- what a role must say ----------------------------------------------------------------------

    @abstractmethod
    def make_room(self, router: str, req: Req, message: Any) -> RoomType:
        """The room of a start message, which is of the accepted kind. Nothing begins yet."""

    @abstractmethod
    def begin(self, room: RoomType) -> None:
        """The room is registered: give its request to the scheduler, now or later."""

    @abstractmethod
    def handle(self, mail: Mail) -> None:
        """A KV-control message."""

    @abstractmethod
    def abandon(self, room: RoomType) -> None:
        """Let go of everything the room holds. It is no longer registered; nobody wants its result."""

    @abstractmethod
    def poll(self, now: float) -> None:
        """Advance hand-offs, in every turn of the loop. Must not block."""

    @abstractmethod
    def sweep(self, now: float) -> None:
        """End what has waited too long, a few times a second: not the business of every token's turn."""

    @abstractmethod
    def on_prefilled(self, req: Req) -> AfterPrefill:
        """NodePolicy: the prompt's KV is complete and the first token was sampled."""

    @abstractmethod
    def backends(self) -> tuple[str, ...]:
        """Transfer backends of this worker, best first, for its record."""

    @abstractmethod
    def close(self) -> None:
        """Free what the role owns. The loop has ended."""

    @property
    def busy(self) -> bool:
        """Does the role hold something beyond its rooms that must end before the worker may go?"""
        return False

    # -- what every role does the same -------------------------------------------------------------

    def on_chunk(self, req: Req) -> None:
        """NodePolicy: a chunk landed. Nothing to do unless a role ships it."""

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """NodePolicy: queue the output for the room's router. With `delta.finish` the room is over here."""
        room = self.rooms.get(req.room, req.epoch)
        assert room is not None, "the scheduler only runs rooms that are registered"
        self.outbox.push(room.router, room.key, start, delta, req.cached_tokens)
        if delta.finish is not None:
            self.end(room)

    def on_failed(self, req: Req, why: RejectKind, message: str) -> None:
        """NodePolicy: the scheduler dropped the request."""
        room = self.rooms.get(req.room, req.epoch)
        if room is not None:
            self.reject(room, why, message)

    def end(self, room: RoomType) -> None:
        """The room's work here is done: bury it and send its part of the timeline."""
        now = time.monotonic()
        self.rooms.end(room.room, room.epoch, now)
        self.outbox.retire(room.key, now)
        self.tell_router(room, self.timeline(room))

    def timeline(self, room: RoomType) -> Timeline:
        """The room's stamps, for the router's trace."""
        return Timeline(room.room, room.epoch, self.worker_id, room.req.stamps)

    def reject(self, room: RoomType, why: RejectKind, message: str, retry_after_s: float = 0.0) -> None:
        """Give the room back to its router. What it holds must be let go by the caller or `abandon`."""
        self.rooms.end(room.room, room.epoch, time.monotonic())
        self.retransmitter.forget_room(room.room, room.epoch)
        self.outbox.discard(room.key)
        self.tell_router(room, Rejected(room.room, room.epoch, why, message, retry_after_s))

    def tell_router(self, room: RoomType, message: Reserved | Rejected | Timeline) -> None:
        """Tell the room's router until it confirms."""
        key = RetransmitKey(room.router, message.room, message.epoch, kind_of(message))
        self.retransmitter.say(key, message, time.monotonic(), _TELL_S)

    def fail(self, room: RoomType, why: RejectKind, message: str) -> None:
        """Reject the room and let go of what it holds."""
        self.reject(room, why, message)
        self.abandon(room)
