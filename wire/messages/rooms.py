"""Between a router and a worker: the rooms that run there."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from wire.messages.base import Message, RoomMessage
from wire.messages.caches import CacheSource
from wire.numbers import Natural, Quantity
from wire.request import GenerateRequest, TokenRun
from wire.stages import RequestStage, Stamp


class FetchSource(msgspec.Struct, frozen=True):
    """A worker from which the receiver of a StartMessage may fetch KV that it lacks.

    According to the router's index it holds the request's first `pages` whole pages, on the device or in host
    memory, and the receiver holds fewer. The index may be late: the source refuses what it has not.
    """

    worker: str  # its id
    mailbox: str
    pages: Natural


class StartMessage(Message, frozen=True, omit_defaults=True):
    """Starts a room on a worker, in the epoch of its request."""

    request: GenerateRequest

    @property
    def room(self) -> int:
        return self.request.room

    @property
    def epoch(self) -> int:
        return self.request.epoch


class Prefill(StartMessage, frozen=True, tag="prefill", omit_defaults=True):
    """Compute the prompt's KV, send token 0 to the router, ship the pages where KVTarget will say."""

    decode: str  # the decode worker's mailbox address
    source: FetchSource | None = None


class Decode(StartMessage, frozen=True, tag="decode", omit_defaults=True):
    """Generate. With `prefill`, reserve pages and wait for KV from that mailbox; without, prefill here.

    `move`: that mailbox is of a decode worker, on which an older epoch of the room runs. It goes on there
    until all of its KV has been taken over (decode_node/moves.py). `source` only comes without `prefill`.
    """

    prefill: str | None = None
    move: bool = False
    source: FetchSource | None = None


class Abort(RoomMessage, frozen=True, tag="abort", omit_defaults=True):
    """The client is gone, or the room has ended elsewhere. Leaves a tombstone on the worker."""

    reason: str = ""


class Ack(Message, frozen=True, tag="ack"):
    """The router holds every token below position `upto` of these (room, epoch, upto). Never repeated."""

    items: list[tuple[Natural, Natural, Natural]]


class Resend(RoomMessage, frozen=True, tag="resend"):
    """Send the room's tokens again from position `start` on: some were lost, or none came for a while.

    Answered with Tokens if there are any, else with RoomStatus, or with Rejected when the room is not known.
    """

    start: Natural


class Claim(Message, frozen=True, tag="claim"):
    """The sender goes on with these rooms of another router, in whatever epoch they are: from now on their
    output goes to it. Answered with Claimed, a repeat too. `token` is echoed."""

    rooms: list[Natural]
    token: Natural


class ClaimedRoom(msgspec.Struct, frozen=True):
    """A room as a worker has it. The first `forced` output tokens came with the start of this epoch: the
    worker has no log-probabilities of them. Epochs up to `newest` may have been used before."""

    room: Natural
    epoch: Natural
    forced: Natural
    newest: Natural = 0


class Claimed(Message, frozen=True, tag="claimed"):
    """Those of the rooms that this worker has. A Resend brings their output, from the first token on."""

    token: Natural
    rooms: list[ClaimedRoom]


class Tokens(Message, frozen=True, tag="tokens"):
    """One step's output of one worker for one router."""

    worker: str
    runs: list[TokenRun]


class Timeline(RoomMessage, frozen=True, tag="timeline", omit_defaults=True):
    """A worker has ended its part in a room: its stamps, when the last of these stages ended (nanoseconds of
    the Unix clock), and the KV that it received (decode): how many bytes, over which backend, from the worker
    at which mailbox, and how long some of it was being written. `cached_from`: tokens of the prompt that it
    found cached at admission, by where their KV came from.

    Repeated until a Receipt, like Reserved and Rejected.
    """

    worker: str
    stamps: list[Stamp]
    kv_bytes: Natural = 0
    kv_backend: str = ""
    kv_from: str = ""
    kv_seconds: Quantity = 0.0
    ended_ns: Natural = 0  # 0: from a worker that does not say it
    cached_from: dict[CacheSource, Natural] = {}


class RoomStatus(RoomMessage, frozen=True, tag="room_status", omit_defaults=True):
    """The worker has the room and no tokens for it yet: where the room is. Answers Resend; never repeated."""

    stage: RequestStage
    place: Natural = 0  # requests that come before it in the queue in which it waits
    waits_for: str = ""  # mailbox of the worker that must act next; "": this one


class Reserved(RoomMessage, frozen=True, tag="reserved"):
    """Decode has reserved its pages; a router that held the Prefill back may send it now."""


class RejectKind(StrEnum):
    """What the router should make of a rejection."""

    INVALID = "invalid"  # the request is wrong: a 400
    OVERLOADED = "overloaded"  # a 429, or another worker
    DRAINING = "draining"  # start again on another worker
    MOVED = "moved"  # the next epoch goes on with the room's KV, on the worker that it was moved to
    FAILED = "failed"  # transfer or engine failed: start again, on any worker
    FAILED_ALONE = "failed_alone"  # only this request of a forward failed: start again once, then a 500
    UNKNOWN = "unknown"  # Resend for a room that this worker does not know: start again
    CLAIMED = "claimed"  # another router goes on with the room: its client has left this one


class Rejected(RoomMessage, frozen=True, tag="rejected", omit_defaults=True):
    """This worker will send no (further) tokens for the room in this epoch.

    `blamed` is the mailbox of the other worker of the room if that one did not do its part. The router hears
    both: when neither is suspected, what is between them is broken.
    """

    why: RejectKind
    message: str
    retry_after_s: Quantity = 0.0
    blamed: str = ""
