"""WorkerRecord: what the directory knows of a worker."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from wire.numbers import Natural, Positive, Quantity, Signed


class Role(StrEnum):
    """Which requests the router sends. A decode worker can also prefill; without prefill workers it is
    "colocated"."""

    PREFILL = "prefill"
    DECODE = "decode"


class GroupLayout(msgspec.Struct, frozen=True):
    """The bytes of one page of one KV group. Two workers exchange pages only if their layouts are equal.

    `shape` is the page's shape as stored, e.g. `[layer, 2, head, page_size, head_dim]`; `tile_order` names
    the order inside a `[page_size, head_dim]` tile ("plain" or "dot_pairs").
    """

    name: str
    kind: str
    shape: tuple[Natural, ...]
    dtype: str
    tile_order: str
    page_size: Positive
    page_bytes: Natural


def layout_digest(groups: tuple[GroupLayout, ...]) -> str:
    """A short name of a set of layouts. Workers with equal digests may exchange pages."""
    return hashlib.sha256(msgspec.msgpack.encode(groups)).hexdigest()[:16]


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's own view of how busy it is, sent with every lease renewal. Tokens unless said."""

    queued_prefill_tokens: Natural = 0  # to compute for waiting prompts, at the hit rate of the latest ones
    running_requests: Natural = 0
    waiting_requests: Natural = 0  # for their turn, memory or a row
    waiting_in_routers: Quantity = 0.0  # rooms, because decode is full: this worker's part of them
    free_tokens: Signed = 0  # available + evictable
    headroom_tokens: Signed = 0  # what a new reservation can take at once, growth of the others deducted
    headroom_rows: Signed = 0  # requests that can be reserved at once
    prefill_tokens_per_s: Quantity = 0.0  # of prompts while it prefills, lately; 0: not known yet
    decode_step_s: Quantity = 0.0  # of one step of the running batch, lately; 0: not known yet
    prompts: Natural = 0  # total since its role began: prompts whose prefill began
    prefilled_tokens: Natural = 0  # likewise
    decoded_tokens: Natural = 0  # likewise
    since_turn_s: Quantity = 0.0  # since the engine loop's last turn: a long forward, or a stuck loop
    age_s: Quantity = 0.0  # since the worker took these figures
    mail_age_s: Quantity = 0.0  # since it took its mail before: what came later is not in them


class GroupPages(msgspec.Struct, frozen=True):
    """The pages of one KV group. Those that are neither free nor evictable are in use."""

    total: Natural
    free: Natural
    evictable: Natural  # cached, and no live request needs them
    evicted: Natural  # total since the start


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: `counts[i]` values in (bounds[i-1], bounds[i]]; the last count is of larger ones."""

    bounds: tuple[Quantity, ...]
    counts: tuple[Natural, ...]
    total: Quantity  # of all values


class MovedPages(msgspec.Struct, frozen=True):
    """What has gone from one tier to another."""

    pages: Natural = 0  # of the primary group
    bytes: Natural = 0  # of all groups
    failed: Natural = 0  # moves
    queued: Natural = 0  # moves that are under way or wait for others


class WorkerFigures(msgspec.Struct, frozen=True):
    """What a worker has counted since its role began, for operators. Routers do not choose by it."""

    groups: dict[str, GroupPages] = {}
    host: dict[str, GroupPages] = {}  # of the host tier; empty without one
    moves: dict[str, MovedPages] = {}  # "to_host", "to_device", "to_peer", "to_storage", "from_storage"
    storage_bytes: Natural = 0  # that the storage says it holds, of all who share it; 0: it does not say
    forwards: Natural = 0
    histograms: dict[
        str, Counts
    ] = {}  # "forward_seconds", "fetch_seconds"; of forwards: "batch_sequences", "batch_tokens"
    prompt_tokens: Natural = 0  # of prompts that were given memory, to be computed here or to come from P
    cached_tokens: Natural = 0  # of those, found in the tree
    cached_from: dict[str, Natural] = {}  # those, by where their KV came from (CacheSource)
    output_tokens: Natural = 0
    finished: Natural = 0
    failed: Natural = 0
    aborted: Natural = 0
    retracted: Natural = 0
    fetches: dict[str, Natural] = {}  # of pages from other workers, by what came of them
    fetched_tokens: Natural = 0
    fetched_bytes: Natural = 0
    lent_pages: Natural = 0
    lent_bytes: Natural = 0
    tenant_pages: dict[str, Natural] = {}  # cached of the primary group, of those that have most
    other_tenants_pages: Natural = 0  # of the other tenants together


PageHashes = Literal["baton", "foreign"]
"""What the block hashes in a worker's KV events are. "baton": the page hash chain of wire/page_hash.py, and
events of the primary group alone. "foreign": hashes of another engine (vLLM, SGLang) behind an adapter; they
are valid within that engine only, and routers hash `token_ids` themselves, in pages of `groups[0].page_size`.
The engine's block size may be a multiple or a divisor of that."""


class WorkerRecord(msgspec.Struct, frozen=True):
    """One live worker. `incarnation` is the directory's number for the process; each process has addresses of
    its own, too."""

    id: str
    incarnation: Natural
    role: Role
    mailbox: str  # ZeroMQ address for requests and KV control
    events: str  # PUB address of KV events of public pages, "" when disabled
    replay: str  # ROUTER address that replays them
    model: str  # served model name
    fingerprint: str  # digest of the weights and their dtype: only workers with equal ones exchange pages
    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(min_length=1)]  # the primary one first
    max_context_tokens: Natural  # longest prompt + output
    total_tokens: Natural  # KV capacity of the primary group
    max_running_requests: Natural
    pid: Natural
    host: str  # identity of the host (boot id + namespace): equal means shared memory works
    transfer_backends: tuple[str, ...]
    load: WorkerLoad = WorkerLoad()
    draining: bool = False
    process_start: Natural = 0  # as in common.host; with `pid` it names the process. 0: not known
    page_hashes: PageHashes = "baton"  # which hashes name the pages in its KV events
    version: str = ""  # what the operator calls this version of the model
    swept: dict[str, Natural] = {}  # what it held for others and gave up at the deadline so far, by kind
    figures: WorkerFigures = WorkerFigures()
    rack: str = ""  # workers with equal labels share a switch; "": not known
    host_tokens: Natural = 0  # KV capacity of the primary group in host memory
    shares_pages: bool = False  # its tenants use public pages, not only their own
    peer_fetch: bool = False  # it copies pages of other workers' caches, and they may copy its own
    private_events: str = ""  # PUB address of KV events of tenants' private pages; "": there are none
    private_replay: str = ""  # ROUTER address that replays them
