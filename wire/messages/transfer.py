"""Between workers: KV of a room, and pages that the other one has."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from wire.checksums import NO_CHECKSUMS, ChecksumMode, PageChecksums
from wire.messages.base import Message, RoomMessage
from wire.numbers import Natural
from wire.request import NO_MARKS, PromptMarks, TokenLogprobs


class GroupTarget(msgspec.Struct, frozen=True):
    """Where one KV group's pages go: logical page `first_page + i` of the sequence into `page_ids[i]`."""

    first_page: Natural
    page_ids: list[Natural]


class TransferEndpoint(msgspec.Struct, frozen=True):
    """One way to write into a decode worker's pool. `params` are the backend's own."""

    backend: str  # "cuda_ipc", "shm", "tcp" or "mooncake"
    address: str
    params: dict[str, str] = {}

    @property
    def identity(self) -> tuple[str, str]:
        """Names the receiver. A worker that comes again may get the address of the one before it, but another
        token."""
        return self.address, self.params.get("token", "")


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
