"""What one event of the dashboard says. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from router.dashboard.figures import FleetFigures, Snapshot, fleet_figures, in_order, kv_use
from router.placement.transfer_rates import machine
from router.trace import RequestSummary
from wire.records import GroupPages, WorkerRecord


class KvPages(msgspec.Struct, frozen=True):
    """Pages of one group on one tier."""

    group: str
    tier: str
    used: int
    cached: int
    free: int
    evicted: int


class WorkerView(msgspec.Struct, frozen=True):
    """One worker."""

    id: str
    role: str
    model: str
    host: str
    rack: str
    draining: bool
    running: int
    most_running: int
    waiting: int
    queued_tokens: int
    prefill_tokens_s: float
    step_s: float
    kv_use: float  # share of the tokens that requests hold
    kv: list[KvPages]


class FlowView(msgspec.Struct, frozen=True):
    """KV from one worker to another."""

    prefill: str
    decode: str
    bytes: float  # in the window
    bytes_per_s: float  # while some were written


class FleetView(msgspec.Struct, frozen=True):
    """All that one event says. Times are seconds; `at` of the Unix clock."""

    at: float
    window_s: float | None  # None: since the routers' start
    figures: FleetFigures
    workers: list[WorkerView]
    flows: list[FlowView]
    requests: list[RequestSummary]


def fleet_view(now: Snapshot, before: Snapshot | None, requests: Sequence[RequestSummary]) -> FleetView:
    """The view of the time between two snapshots."""
    return FleetView(
        time.time(),
        None if before is None else now.at - before.at,
        fleet_figures(now, before),
        [_worker(one) for one in in_order(now.workers)],
        flows(now, before),
        list(requests),
    )


def flows(now: Snapshot, before: Snapshot | None) -> list[FlowView]:
    """KV that has moved in the time between two snapshots, by pair of workers."""
    counted = now.samples if before is None else now.samples.since(before.samples)
    nbytes = counted.by_pair("baton_router_pair_transfer_bytes_total")
    seconds = counted.by_pair("baton_router_pair_transfer_seconds_total")
    return [
        FlowView(prefill, decode, moved, moved / seconds[prefill, decode])
        for (prefill, decode), moved in sorted(nbytes.items())
        if moved and seconds.get((prefill, decode))
    ]


def _worker(record: WorkerRecord) -> WorkerView:
    load = record.load
    return WorkerView(
        record.id, record.role, record.model, machine(record.host), record.rack, record.draining,
        load.running_requests, record.max_running_requests, load.waiting_requests,
        load.queued_prefill_tokens, load.prefill_tokens_per_s, load.decode_step_s, kv_use(record),
        [_pages(name, pages) for name, pages in record.figures.groups.items()],
    )  # fmt: skip


def _pages(group: str, pages: GroupPages) -> KvPages:
    used = max(pages.total - pages.free - pages.evictable, 0)
    return KvPages(group, "device", used, pages.evictable, pages.free, pages.evicted)
