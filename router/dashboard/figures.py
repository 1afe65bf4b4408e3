"""What `baton top` and the dashboard show, computed from metrics and workers' records. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from wire.records import Role, WorkerRecord

_Series = tuple[str, tuple[tuple[str, str], ...]]  # name, labels in order


@dataclass(frozen=True)
class Samples:
    """Samples of metrics, by series."""

    values: dict[_Series, float]

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series of that name that have these labels."""
        wanted = labels.items()
        return sum(value for (of, own), value in self.values.items() if of == name and wanted <= set(own))

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums by one label's value."""
        sums: dict[str, float] = {}
        for (of, own), value in self.values.items():
            if of == name and label in (labels := dict(own)):
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def by_pair(self, name: str) -> dict[tuple[str, str], float]:
        """The sums by the prefill and the decode worker."""
        sums: dict[tuple[str, str], float] = {}
        for (of, own), value in self.values.items():
            labels = dict(own) if of == name else {}
            if "prefill" in labels and "decode" in labels:
                pair = labels["prefill"], labels["decode"]
                sums[pair] = sums.get(pair, 0.0) + value
        return sums

    def quantile(self, histogram: str, share: float) -> float | None:
        """The value that this share of what a histogram counted is below, interpolated within its bucket.

        None when nothing was counted; the last finite bound for what is above it.
        """
        buckets = sorted((float(le), n) for le, n in self.by(f"{histogram}_bucket", "le").items())
        if not buckets or buckets[-1][1] <= 0:
            return None
        wanted, lower, below = share * buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if count >= wanted and count > below:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (wanted - below) / (count - below)
            lower, below = bound, count
        return lower

    def since(self, before: Samples) -> Samples:
        """What counters and histograms have counted since. One that is smaller now began anew."""
        grown = {}
        for series, value in self.values.items():
            past = before.values.get(series, 0.0)
            grown[series] = value - past if value >= past else value
        return Samples(grown)


def parse_samples(text: str) -> Samples:
    """The samples in Prometheus's text format."""
    return Samples(
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def added(several: Iterable[Samples]) -> Samples:
    """The sum of several routers' samples."""
    sums: dict[_Series, float] = {}
    for samples in several:
        for series, value in samples.values.items():
            sums[series] = sums.get(series, 0.0) + value
    return Samples(sums)


@dataclass(frozen=True)
class Snapshot:
    """What all routers said at one time (seconds, any origin)."""

    at: float
    samples: Samples
    workers: list[WorkerRecord]
    routers: list[str]  # that answered
    silent: list[str]  # that did not


@dataclass(frozen=True)
class FleetFigures:
    """Figures of a whole fleet. Rates are per second; None where nothing was counted."""

    rooms: float  # that run
    queued: float  # that wait in routers
    requests_s: float | None
    output_tokens_s: float | None
    hit_rate: float | None  # share of prompt tokens that were cached
    cached_from: dict[str, float]  # of what workers found cached, shares by where its KV came from
    ttft_s: tuple[float | None, float | None, float | None]  # p50, p95, p99
    itl_s: tuple[float | None, float | None, float | None]
    transfers: dict[str, float]  # locality -> bytes per second while some were written
    transfer_bytes_s: float | None
    statuses: dict[str, float]  # of answers that were errors
    restarts: float
    suspected: float


_SHARES = (0.5, 0.95, 0.99)


def fleet_figures(now: Snapshot, before: Snapshot | None) -> FleetFigures:
    """The figures of the time between two snapshots; without `before`, since the routers' start."""
    counted = now.samples if before is None else now.samples.since(before.samples)
    passed = None if before is None else max(1e-9, now.at - before.at)

    def per_second(name: str) -> float | None:
        return None if passed is None else counted.total(name) / passed

    def quantiles(name: str) -> tuple[float | None, float | None, float | None]:
        p50, p95, p99 = (counted.quantile(name, share) for share in _SHARES)
        return p50, p95, p99

    prompts = counted.total("baton_router_prompt_tokens_total")
    seconds = counted.by("baton_router_transfer_seconds_total", "locality")
    cached = counted.by("baton_worker_cached_tokens_total", "tier")
    return FleetFigures(
        rooms=now.samples.total("baton_router_rooms"),
        queued=now.samples.total("baton_router_queued_rooms"),
        requests_s=per_second("baton_router_requests_total"),
        output_tokens_s=per_second("baton_router_output_tokens_total"),
        hit_rate=counted.total("baton_router_cached_tokens_total") / prompts if prompts else None,
        cached_from={tier: tokens / sum(cached.values()) for tier, tokens in cached.items() if tokens},
        ttft_s=quantiles("baton_router_ttft_seconds"),
        itl_s=quantiles("baton_router_itl_seconds"),
        transfers={
            near: nbytes / seconds[near]
            for near, nbytes in counted.by("baton_router_transfer_bytes_total", "locality").items()
            if seconds.get(near)
        },
        transfer_bytes_s=per_second("baton_router_kv_bytes_total"),
        statuses={
            status: count
            for status, count in counted.by("baton_router_requests_total", "status").items()
            if count and status[:1] in ("4", "5")
        },
        restarts=counted.total("baton_router_restarts_total"),
        suspected=now.samples.total("baton_router_suspected"),
    )


def kv_use(worker: WorkerRecord) -> float:
    """The share of a worker's KV memory that requests hold: what is cached and unlocked counts as free."""
    return max(0.0, 1.0 - worker.load.free_tokens / max(1, worker.total_tokens))


def in_order(workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Prefill before decode, then by name."""
    return sorted(workers, key=lambda one: (one.role is Role.DECODE, one.id))
