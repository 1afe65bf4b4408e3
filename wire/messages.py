"""Messages between router and workers, between workers, and with the directory.

Every message about a room is idempotent: it is keyed (room, epoch, kind), its sender repeats it until a
`Receipt` (or the thing asked for) comes back, and its receiver answers a repeat like the first. A room is
one choice of one request; its epoch grows each time the router starts it again, and a message of an older
epoch is stale (docs/decisions/0015).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from wire.checksums import NO_CHECKSUMS, ChecksumMode, PageChecksums
from wire.numbers import Natural, Quantity
from wire.records import Role, WorkerRecord
from wire.request import NO_MARKS, GenerateRequest, PromptMarks, TokenLogprobs, TokenRun
from wire.settings import NO_SETTINGS, Settings, TenantGeneration
from wire.stages import RequestStage, Stamp


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", gc=False):
    """Base of everything that goes through a mailbox. A message cannot be part of a reference cycle, so the
    garbage collector does not track it."""


class RoomMessage(Message, frozen=True, omit_defaults=True):
    """About one room in one epoch."""

    room: Natural
    epoch: Natural


def kind_of(message: Message) -> str:
    """The `kind` that a message carries on the wire."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), "every message class has a tag"
    return tag


class Receipt(RoomMessage, frozen=True, tag="receipt"):
    """The receiver has taken (or had already taken) the message of kind `of`."""

    of: str


# -- router -> worker ------------------------------------------------------------------------------


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


class Inspect(Message, frozen=True, tag="inspect"):
    """Ask a worker for a report: "memory", "tree" (text), "nodes" (the tree for a program), "load", "metrics"
    or "rooms". `token` is echoed."""

    what: str
    token: Natural


class Inspected(Message, frozen=True, tag="inspected"):
    """The report, as JSON (the tree: text)."""

    token: Natural
    body: str


CacheTier = Literal["device", "host", "storage"]
CacheSource = Literal["device", "host", "storage", "peer"]
"""Where a worker has cached tokens of a prompt from; a peer is another worker."""


class ClearCache(Message, frozen=True, tag="clear_cache"):
    """Router -> worker: forget what is cached in these tiers and not in use. Answered with CacheCleared, once
    all are clear; a repeat, which has the same `token`, with the same answer."""

    tiers: list[CacheTier]
    token: Natural


class CacheCleared(Message, frozen=True, tag="cache_cleared", omit_defaults=True):
    """What a worker has forgotten, by tier; tiers that it does not have are left out. Of device and host
    these are pages of the primary group, of storage the blobs that it said it held, of all who share it.

    `problem` is why a tier is not clear.
    """

    token: Natural
    freed: dict[CacheTier, Natural]
    problem: str = ""


class ForgetTenant(Message, frozen=True, tag="forget_tenant"):
    """Router -> worker: the tenant is in this generation now, and what it cached in older ones is to be
    removed. Answered with TenantForgotten, in seconds; a repeat, which has the same `token`, with the same
    answer."""

    tenant: str
    generation: TenantGeneration
    token: Natural


class TierRemoval(msgspec.Struct, frozen=True):
    """What a worker has removed from a tier: pages of the primary group (of storage blobs), and bytes of all
    groups."""

    pages: Natural = 0
    bytes: Natural = 0


class TenantForgotten(Message, frozen=True, tag="tenant_forgotten", omit_defaults=True):
    """What a worker has removed of a tenant; tiers that it does not have are left out.

    `locked_pages` are in use, by streams that began before or by moves between tiers: they go when these end.
    `unfinished` are the tiers where it goes on. `problem` is why a tier keeps what it has.
    """

    token: Natural
    nodes: Natural
    removed: dict[CacheTier, TierRemoval]
    locked_pages: Natural = 0
    unfinished: list[CacheTier] = []
    problem: str = ""


# -- worker -> router ------------------------------------------------------------------------------


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


# -- decode <-> prefill, or the decode worker that a room moves away from ----------------------------


class GroupTarget(msgspec.Struct, frozen=True):
    """Where one KV group's pages go: logical page `first_page + i` of the sequence into `page_ids[i]`."""

    first_page: Natural
    page_ids: list[Natural]


class TransferEndpoint(msgspec.Struct, frozen=True):
    """One way to write into a decode worker's pool. `params` are the backend's own."""

    backend: str  # "cuda_ipc", "shm", "tcp" or "mooncake"
    address: str
    params: dict[str, str] = {}


class KVTarget(RoomMessage, frozen=True, tag="kv_target"):
    """Decode -> prefill: write the room's pages here. Repeated, at growing intervals, until the KV has come.

    Prefill answers each with a Receipt while it has the room, and with KVFailed when the room is over there.

    `endpoints` are all ways into the pool, best first. Prefill takes the first that works for it: whether the
    two share a host or a fabric depends on both. `layout` is the digest of decode's page layouts
    (`wire.records.layout_digest`): prefill refuses a target whose layout differs from its own. `checksums` is
    the least that decode wants; prefill sends these, or more if its own option says more. `context_tokens`
    are those of the request: prompt and forced. The room of a move may have more meanwhile, and there are
    some more pages for them.
    """

    decode: str  # decode worker id
    host: str  # as in WorkerRecord
    layout: str
    endpoints: list[TransferEndpoint]
    groups: dict[str, GroupTarget]
    context_tokens: Natural
    checksums: ChecksumMode = ChecksumMode.NONE

    @property
    def receiver(self) -> str:
        """The worker whose pages these are."""
        return self.decode


class KVReady(RoomMessage, frozen=True, tag="kv_ready"):
    """Prefill -> decode: the room's KV is computed, and prefill waits for its KVTarget. Repeated, at growing
    intervals, until the target comes.

    Decode answers each with a Receipt while it has the room, and with Abort when the room is over there.
    """


class KVDone(RoomMessage, frozen=True, tag="kv_done", omit_defaults=True):
    """Prefill -> decode: every page of the room has landed. Repeated until a Receipt.

    A decode worker that hands a room over sends `output`, too: what it sampled after `forced` and before
    `first_token`, with its log-probabilities if they are asked for. That worker holds the room until it gets
    the Receipt, which says that the room goes on here, or KVFailed, after which it goes on there.
    """

    context_tokens: Natural  # prompt + forced + output: what the pages hold
    first_token: Natural
    kv_bytes: Natural
    logprobs: TokenLogprobs | None = None
    cached_tokens: Natural = 0
    checksums: PageChecksums = NO_CHECKSUMS
    output: list[Natural] = []
    output_logprobs: list[TokenLogprobs] = []


class KVFailed(RoomMessage, frozen=True, tag="kv_failed", omit_defaults=True):
    """Prefill -> decode: the pages of this epoch will not come. Repeated until a Receipt.

    Also to a decode worker that hands a room over, from the other one or from the router: this epoch, newer
    than the room's, takes nothing over. `blameless`: prefill took the pages back, and the way from one
    worker to the other is sound.
    """

    reason: str
    blameless: bool = False


class Release(RoomMessage, frozen=True, tag="release"):
    """Prefill -> decode: token 0 ended the request; drop the reservation. Repeated until a Receipt."""


# -- worker -> worker: pages that the other one has --------------------------------------------------


class TransferMessage(Message, frozen=True, omit_defaults=True):
    """About one fetch. `transfer` is the requester's own random number."""

    transfer: Natural


class Fetch(TransferMessage, frozen=True, tag="fetch"):
    """Requester -> holder: write the KV of these tokens here, as much of it as you have. Repeated until it is
    answered with Fetched or FetchRefused; a repeat is answered like the first.

    The pages of the requester are reserved. The holder writes them under the grants of the transfer and
    `FETCH_EPOCH`. Both must compute the same KV (`fingerprint`) and lay it out alike (`layout`). The pages
    are named by what their hash chain is made of: its `seed` and the tokens.
    """

    receiver: str  # the requester's worker id
    host: str  # as in WorkerRecord
    fingerprint: str  # of the model, as in WorkerRecord
    layout: str
    endpoints: list[TransferEndpoint]
    seed: bytes  # of the namespace
    extra_key: str
    cache_salt: str
    tenant: str  # whose private pages are meant; "": everybody's alone
    tokens: bytes  # whole pages, from the prompt's begin
    have: (
        Natural  # tokens with which the requester could go on already: a prefix that is no longer is useless
    )
    groups: dict[str, GroupTarget]  # of a window group as many pages as a query sees; of a state group a slot
    checksums: ChecksumMode
    marks: PromptMarks = NO_MARKS


FETCH_EPOCH = (1 << 31) - 1
"""In grants, the epoch of all transfers; rooms never have it."""


class Fetched(TransferMessage, frozen=True, tag="fetched"):
    """Holder -> requester: of the first `pages` pages, those that the requester lacked are written, and of a
    window and a state group what a forward needs that goes on there."""

    pages: Natural
    digest: bytes  # of the last of them: it names all
    kv_bytes: Natural
    checksums: PageChecksums


class RefusalCause(StrEnum):
    """Why a worker writes no pages for a Fetch."""

    ABSENT = "absent"  # it has no more than the requester
    BUSY = "busy"  # what it may lend at once is lent
    DIFFERENT = "different"  # another model, layout or namespace
    UNREACHABLE = "unreachable"  # no transport leads there, or the write failed


class FetchRefused(TransferMessage, frozen=True, tag="fetch_refused"):
    """Holder -> requester: compute it."""

    cause: RefusalCause
    reason: str


# -- directory -------------------------------------------------------------------------------------


class Join(Message, frozen=True, tag="join"):
    """A worker process asks for its incarnation, again and again until it has one. `nonce` is the process's
    own, drawn at its start. An older process of the same id is replaced at once."""

    worker: str
    nonce: Natural


class Joined(Message, frozen=True, tag="joined"):
    """The process is the worker of that id, as this incarnation. A repeated Join gets the same."""

    worker: str
    nonce: Natural
    incarnation: Natural
    lease_s: Quantity


class Replaced(Message, frozen=True, tag="replaced"):
    """A newer process is the worker of that id, or this one has withdrawn: it ends its rooms and itself."""

    worker: str
    nonce: Natural


class Announce(Message, frozen=True, tag="announce", omit_defaults=True):
    """A worker renews its lease, with its current load. `nonce` is that of its Join. `settings` are all that
    it knows."""

    record: WorkerRecord
    nonce: Natural = 0  # 0: it has not joined, but chosen an incarnation itself
    settings: Settings = NO_SETTINGS


class Announced(Message, frozen=True, tag="announced", omit_defaults=True):
    """The lease holds for `lease_s` seconds from the last Announce. `settings` are all that the directory
    knows; when they change, it says so unasked."""

    worker: str
    incarnation: Natural
    lease_s: Quantity
    settings: Settings = NO_SETTINGS


class AnnounceRefused(Message, frozen=True, tag="announce_refused"):
    """This record cannot join: the parts of a ConfigError (common/errors.py)."""

    worker: str
    incarnation: Natural
    key: str
    problem: str
    remedy: str


class Withdraw(Message, frozen=True, tag="withdraw"):
    """A worker leaves on purpose."""

    worker: str
    incarnation: Natural


class Watch(Message, frozen=True, tag="watch", omit_defaults=True):
    """A router asks for every View of the next few seconds, and to be listed in them. It repeats the message
    to renew both, with a greater `number` each time. `seen` are the highest incarnations that it has seen, by
    worker id. `admin` is the URL of its admin listener; "": it has none. `settings` are all that it knows."""

    number: Natural = 0
    seen: dict[str, Natural] = {}
    admin: str = ""
    settings: Settings = NO_SETTINGS


class View(Message, frozen=True, tag="view", omit_defaults=True):
    """All records whose lease holds. `watch` is the greatest number of a Watch that the directory has from
    this router; `version` grows with every change of membership or draining. A View is newer than another if
    (`watch`, `version`) is greater, also when the directory has been started again between them.

    `routers` are the mailboxes of all who watch, `admins` the URLs of their admin listeners. `settings` are
    all that the directory knows.
    """

    watch: Natural
    version: Natural
    records: list[WorkerRecord]
    routers: list[str] = []
    admins: list[str] = []
    settings: Settings = NO_SETTINGS


class SetRole(Message, frozen=True, tag="set_role"):
    """Directory -> worker: take this role. Repeated until RoleSet. A worker with the other role drains, and
    joins again under its id as a new incarnation with new addresses (worker/switch.py)."""

    role: Role


class RoleSet(Message, frozen=True, tag="role_set", omit_defaults=True):
    """Worker -> directory: it has that role, or is about to take it. With a `problem` it is not, because of
    that."""

    worker: str
    role: Role
    problem: str = ""


# -- router <-> router -----------------------------------------------------------------------------


class AssignedLoadRow(msgspec.Struct, frozen=True, array_like=True):
    """What a router has assigned to one worker (router/placement/load_estimate.py: AssignedLoad)."""

    worker: str
    incarnation: Natural
    requests: Natural
    prefills: Natural
    prefill_tokens: Natural
    context_tokens: Natural
    since_tokens: Natural
    promised_tokens: Natural
    promised_rooms: Natural


class AssignedLoads(Message, frozen=True, tag="accounts"):
    """What a router has assigned to workers, in absolute values. Never answered; sent whole once a second.

    `incarnation` is the router's. `number` grows with each of its messages; a row is newer than one with a
    smaller number. `whole`: nothing is assigned to workers that are not listed.
    """

    incarnation: Natural
    number: Natural
    whole: bool
    rows: list[AssignedLoadRow]


class KeepResponse(Message, frozen=True, tag="keep_response"):
    """Keep a copy of an answer of /v1/responses (router/kept_responses.py). Never answered."""

    tenant: str
    response: str  # its id
    content: bytes


class FindResponse(Message, frozen=True, tag="find_response"):
    """Ask for a response. Answered with FoundResponse; `token` is echoed."""

    tenant: str
    response: str
    token: Natural


class FoundResponse(Message, frozen=True, tag="found_response"):
    """Its content; b"": the sender has no such response."""

    token: Natural
    content: bytes


class DropResponse(Message, frozen=True, tag="drop_response"):
    """Forget a response. Never answered."""

    tenant: str
    response: str


AnyMessage = (
    Receipt | Prefill | Decode | Abort | Ack | Resend | Claim | Inspect | Inspected | ClearCache
    | CacheCleared | Claimed | Tokens | Timeline | RoomStatus | Reserved | Rejected | KVTarget | KVReady
    | KVDone | KVFailed | Release | Join | Joined | Replaced | Announce | Announced | AnnounceRefused
    | Withdraw | Watch | View | SetRole | RoleSet | AssignedLoads | KeepResponse | FindResponse
    | FoundResponse | DropResponse | Fetch | Fetched | FetchRefused | ForgetTenant | TenantForgotten
)  # fmt: skip
