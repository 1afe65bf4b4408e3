"""What the workers' latest records say, for Prometheus: no worker is asked when it asks.

Counters are of one process of a worker. They begin anew with it, which `rate()` and `increase()` allow for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.tenant_labels import OTHER, TenantLabels
from wire.messages.caches import CacheSource
from wire.records import WorkerRecord

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)
Read = Callable[[WorkerRecord], float]

_LEVELS: Sequence[tuple[str, str, Read]] = (
    ("running_requests", "Requests in prefill or decode", lambda r: r.load.running_requests),
    ("waiting_requests", "Requests that wait for their turn", lambda r: r.load.waiting_requests),
    (
        "queued_prefill_tokens",
        "Tokens to compute of waiting prompts",
        lambda r: r.load.queued_prefill_tokens,
    ),
    ("headroom_tokens", "What a new request can reserve at once", lambda r: r.load.headroom_tokens),
    ("prefill_tokens_per_second", "Speed of prefill, lately", lambda r: r.load.prefill_tokens_per_s),
    ("decode_step_seconds", "Time of a decode step, lately", lambda r: r.load.decode_step_s),
    ("since_turn_seconds", "Since the engine loop's last turn", lambda r: r.load.since_turn_s),
    ("kv_usage_ratio", "Part of the KV tokens that live requests use", lambda record: _usage(record)),
    (
        "storage_bytes",
        "What its storage says it holds, of all who share it",
        lambda r: r.figures.storage_bytes,
    ),
    ("draining", "1: it takes no new requests", lambda r: float(r.draining)),
)
_TOTALS: Sequence[tuple[str, str, Read]] = (
    ("prompts", "Prompts whose prefill began", lambda r: r.load.prompts),
    ("prompt_tokens", "Tokens of prompts that it took memory for", lambda r: r.figures.prompt_tokens),
    ("prefill_tokens", "Tokens computed by prefill", lambda r: r.load.prefilled_tokens),
    ("decode_tokens", "Tokens computed by decode", lambda r: r.load.decoded_tokens),
    ("output_tokens", "Tokens that requests got", lambda r: r.figures.output_tokens),
    ("finished_requests", "Requests that came to their end", lambda r: r.figures.finished),
    ("failed_requests", "Requests that failed", lambda r: r.figures.failed),
    ("aborted_requests", "Requests that were given up", lambda r: r.figures.aborted),
    ("retractions", "Requests put back into the queue for want of memory", lambda r: r.figures.retracted),
    (
        "fetched_tokens",
        "Prompt tokens whose KV came from another worker's cache",
        lambda r: r.figures.fetched_tokens,
    ),
    ("fetched_bytes", "Bytes that came from other workers' caches", lambda r: r.figures.fetched_bytes),
    ("lent_pages", "Cached pages that other workers copied", lambda r: r.figures.lent_pages),
    ("lent_bytes", "Bytes that other workers copied of its cache", lambda r: r.figures.lent_bytes),
    ("forwards", "Forwards", lambda r: r.figures.forwards),
)
_HISTOGRAMS = (
    ("forward_seconds", "Seconds of forwards, from launch to result"),
    ("batch_sequences", "Sequences of a forward"),
    ("batch_tokens", "Tokens that a forward computes"),
    ("fetch_seconds", "Seconds until pages of another worker's cache had come"),
)


class WorkerMetrics(Collector):
    """Every figure has the labels worker, role and model; pages have their group's name and their
    tier, too."""

    def __init__(
        self,
        registry: CollectorRegistry,
        workers: Callable[[], Iterable[WorkerRecord]],
        tenants: TenantLabels | None = None,
    ) -> None:
        """`tenants` may be shared with other metrics."""
        self._workers = workers
        self._tenants = tenants or TenantLabels()
        registry.register(self)

    def collect(self) -> Iterator[Family]:
        workers = list(self._workers())
        for name, about, read in _LEVELS:
            yield _filled(GaugeMetricFamily(f"baton_worker_{name}", about, labels=_LABELS), workers, read)
        for name, about, read in _TOTALS:
            yield _filled(CounterMetricFamily(f"baton_worker_{name}", about, labels=_LABELS), workers, read)
        for name, about in _HISTOGRAMS:
            yield _histogram(name, about, workers)
        yield from _pages(workers)
        yield from _moves(workers)
        yield _tenant_pages(workers, self._tenants)
        yield _fetches(workers)
        yield _information(workers)
        swept = CounterMetricFamily(
            "baton_worker_swept_holds",
            "What a worker held for others and gave up at its deadline",
            labels=["worker", "kind"],
        )
        for record in workers:
            for kind, count in record.swept.items():
                swept.add_metric([record.id, kind], count)
        yield swept


_LABELS = ("worker", "role", "model")
_DEVICE, _HOST = "device", "host"


def _named(record: WorkerRecord) -> list[str]:
    return [record.id, record.role, record.model]


def _filled(family: F, workers: Iterable[WorkerRecord], read: Read) -> F:
    for record in workers:
        family.add_metric(_named(record), read(record))
    return family


def _usage(record: WorkerRecord) -> float:
    """Cached tokens that no request needs are not in use: they give way to new ones."""
    if not record.total_tokens:
        return 0.0
    return 1 - min(max(record.load.free_tokens, 0), record.total_tokens) / record.total_tokens


def _histogram(name: str, about: str, workers: Iterable[WorkerRecord]) -> Family:
    family = HistogramMetricFamily(f"baton_worker_{name}", about, labels=_LABELS)
    for record in workers:
        told = record.figures.histograms.get(name)
        if told is not None and len(told.counts) == len(told.bounds) + 1:
            bounds = [*map(floatToGoString, told.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(told.counts), strict=True))
            family.add_metric(_named(record), buckets, told.total)
    return family


def _information(workers: Iterable[WorkerRecord]) -> Family:
    family = GaugeMetricFamily(
        "baton_worker_info", "1 for each worker, with what does not change in its labels",
        labels=(*_LABELS, "version", "host", "page_tokens", "pages", "context_tokens"),
    )  # fmt: skip
    for record in workers:
        page = record.groups[0].page_size if record.groups else 0
        fixed = (page, record.total_tokens // page if page else 0, record.max_context_tokens)
        family.add_metric([*_named(record), record.version, record.host, *map(str, fixed)], 1)
    return family


def _fetches(workers: Iterable[WorkerRecord]) -> Family:
    family = CounterMetricFamily(
        "baton_worker_fetches",
        "Fetches from another worker's cache, by what came of them",
        labels=(*_LABELS, "outcome"),
    )
    for record in workers:
        for outcome, count in record.figures.fetches.items():
            family.add_metric([*_named(record), outcome], count)
    return family


def _tenant_pages(workers: Iterable[WorkerRecord], labels: TenantLabels) -> Family:
    family = GaugeMetricFamily(
        "baton_worker_tenant_pages",
        "KV pages of the primary group that are cached, by tenant, where tenants have shares or share pages; "
        "public pages are anonymous",
        labels=(*_LABELS, "tenant"),
    )
    for record in workers:
        figures = record.figures
        pages = Counter({OTHER: figures.other_tenants_pages} if figures.other_tenants_pages else {})
        for tenant, count in figures.tenant_pages.items():
            pages[labels.of(tenant)] += count
        for label, count in pages.items():
            family.add_metric([*_named(record), label], count)
    return family


def _pages(workers: Iterable[WorkerRecord]) -> Iterator[Family]:
    pages = GaugeMetricFamily(
        "baton_worker_kv_pages", "KV pages, by what they are", labels=(*_LABELS, "group", "tier", "state")
    )
    evicted = CounterMetricFamily(
        "baton_worker_evicted_pages", "Cached KV pages that gave way", labels=(*_LABELS, "group", "tier")
    )
    cached = CounterMetricFamily(
        "baton_worker_cached_tokens",
        "Prompt tokens found in the worker's tree, by where their KV came from; a peer is another worker",
        labels=(*_LABELS, "tier"),
    )
    for record in workers:
        for source in get_args(CacheSource):
            cached.add_metric([*_named(record), source], record.figures.cached_from.get(source, 0))
        for tier, groups in ((_DEVICE, record.figures.groups), (_HOST, record.figures.host)):
            for group, of in groups.items():
                used = max(of.total - of.free - of.evictable, 0)
                for state, count in (("used", used), ("cached", of.evictable), ("free", of.free)):
                    pages.add_metric([*_named(record), group, tier, state], count)
                evicted.add_metric([*_named(record), group, tier], of.evicted)
    yield pages
    yield evicted
    yield cached


def _moves(workers: Iterable[WorkerRecord]) -> Iterator[Family]:
    labels = (*_LABELS, "move")
    pages = CounterMetricFamily(
        "baton_worker_moved_pages", "KV pages that went from one tier to another", labels=labels
    )
    nbytes = CounterMetricFamily("baton_worker_moved_bytes", "Bytes of all groups of those", labels=labels)
    failed = CounterMetricFamily(
        "baton_worker_failed_moves", "Moves between tiers that failed", labels=labels
    )
    queued = GaugeMetricFamily(
        "baton_worker_queued_moves", "Moves between tiers that are under way or wait", labels=labels
    )
    for record in workers:
        for move, of in record.figures.moves.items():
            queued.add_metric([*_named(record), move], of.queued)
            pages.add_metric([*_named(record), move], of.pages)
            nbytes.add_metric([*_named(record), move], of.bytes)
            failed.add_metric([*_named(record), move], of.failed)
    yield pages
    yield nbytes
    yield failed
    yield queued
