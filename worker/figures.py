"""What a worker's record carries of its work: the load, for routers, and figures for operators."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter

from msgspec.structs import replace

from kvcache.memory import Memory
from kvcache.radix_tree import pages_by_tenant
from kvcache.storage.backend import StorageStats
from scheduler.metrics import SchedulerMetrics
from wire.page_hash import tenant_of_key
from wire.records import Counts, GroupPages, MovedPages, WorkerFigures, WorkerLoad

_TENANTS_TOLD = 64  # the record goes to every router several times a second


@dataclass(frozen=True, slots=True)
class LoadLook:
    """One look at the load. Times are of the monotonic clock. The loop replaces it whole, because the
    heartbeat's thread reads it."""

    load: WorkerLoad
    taken_at: float
    mail_at: float  # when the mail that it includes was taken: at the beginning of that turn

    def aged(self, turned_at: float, now: float) -> WorkerLoad:
        """The load with its ages. They are no times, because hosts' clocks differ."""
        return replace(
            self.load,
            since_turn_s=round(now - turned_at, 3),
            age_s=round(now - self.taken_at, 3),
            mail_age_s=round(now - self.mail_at, 3),
        )


def worker_figures(memory: Memory, metrics: SchedulerMetrics) -> WorkerFigures:
    """Read on the engine loop, several times a second."""
    tree, stored = memory.cache.tree, _stored(memory)
    tenants = pages_by_tenant(tree)
    told: Counter[str] = Counter()  # by name: of a forgotten tenant there may be pages of two generations
    for key, pages in heapq.nlargest(_TENANTS_TOLD, tenants.items(), key=itemgetter(1)):
        told[tenant_of_key(key)[0]] += pages
    return WorkerFigures(
        groups={
            name: GroupPages(
                total=allocator.num_pages,
                free=allocator.available_pages(),
                evictable=tree.evictable(name),
                evicted=allocator.evicted,
            )
            for name, allocator in memory.allocators.items()
        },
        host=_host(memory),
        moves=_moves(memory),
        storage_bytes=stored.bytes,
        forwards=metrics.steps,
        histograms={
            name: Counts(histogram.bounds, tuple(histogram.counts), histogram.total)
            for name, histogram in (
                ("forward_seconds", metrics.forward_seconds),
                ("batch_sequences", metrics.batch_sequences),
                ("batch_tokens", metrics.batch_tokens),
                ("fetch_seconds", metrics.fetch_seconds),
            )
        },
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        cached_from=dict(metrics.cached_from),
        output_tokens=metrics.output_tokens,
        finished=metrics.finished,
        failed=metrics.failed,
        aborted=metrics.aborted,
        retracted=metrics.retracted,
        fetches=dict(metrics.fetches),
        fetched_tokens=metrics.fetched_tokens,
        fetched_bytes=metrics.fetched_bytes,
        lent_pages=metrics.lent_pages,
        lent_bytes=metrics.lent_bytes,
        tenant_pages=told,
        other_tenants_pages=sum(tenants.values()) - sum(told.values()),
    )


def _host(memory: Memory) -> dict[str, GroupPages]:
    """The host tier's pages. Those in use are being written or read."""
    if memory.tiers is None:
        return {}
    evicted, pages = memory.tiers.host.evicted_pages, {}
    for name, arena in memory.tiers.host.pool.arenas.items():
        free = arena.allocator.available_pages()
        pages[name] = GroupPages(arena.num_pages, free, arena.num_pages - free, evicted.get(name, 0))
    return pages


def _moves(memory: Memory) -> dict[str, MovedPages]:
    if memory.tiers is None:
        return {}
    moves, at_once = memory.tiers.moves, memory.tiers.host.written_back
    counts, writing = moves.counts, sum(1 for _ in moves.held_on_host())
    read = memory.tiers.reads.counts
    moved = {
        "to_host": MovedPages(
            counts.to_host_pages + at_once.pages,
            counts.to_host_bytes + at_once.bytes,
            counts.failed_backups,
            writing,
        ),
        "to_device": MovedPages(
            counts.to_device_pages, counts.to_device_bytes, counts.failed_loads, moves.loads.loading
        ),
        "to_peer": MovedPages(read.host_pages, read.host_bytes, read.failed, memory.tiers.reads.under_way),
    }
    if (storage := memory.tiers.storage) is not None:
        done, told, queued = storage.counts, storage.stats(), storage.queued()
        moved["to_storage"] = MovedPages(
            done.written_pages, told.written_bytes, done.failed_writes, queued["to_storage"]
        )
        moved["from_storage"] = MovedPages(
            done.read_pages, told.read_bytes, sum(told.refused.values()), queued["from_storage"]
        )
    return moved


def _stored(memory: Memory) -> StorageStats:
    tiers = memory.tiers
    return StorageStats() if tiers is None or tiers.storage is None else tiers.storage.stats()
