"""What the router counts, in a registry of its own (two routers in one process must not collide)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.event_counters import EventCounters
from wire.stages import Stamp

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ERRORS = (*(-second for second in reversed(_SECONDS) if second <= 30), 0, *_SECONDS[:-2])
_TOKENS = (-16384, -4096, -1024, -256, -64, -1, 0, 63, 255, 1023, 4095, 16383)  # up to -1: the index lacked


class RouterMetrics:
    """Updated per request, never per token."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "baton_router_requests_total", "Requests by HTTP status", ["status"], registry=registry
        )
        self.rooms = Gauge("baton_router_rooms", "Rooms in flight", registry=registry)
        self.queued_rooms = Gauge(
            "baton_router_queued_rooms", "Rooms that wait for their turn", registry=registry
        )
        self.restarts = Counter("baton_router_restarts_total", "Rooms started again", registry=registry)
        self.aborts = Counter(
            "baton_router_aborts_total", "Requests ended by their client", registry=registry
        )
        self.prompt_tokens = Counter("baton_router_prompt_tokens_total", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter(
            "baton_router_cached_tokens_total", "Prompt tokens that were not computed", registry=registry
        )
        self.output_tokens = Counter("baton_router_output_tokens_total", "Output tokens", registry=registry)
        self.kv_bytes = Counter(
            "baton_router_kv_bytes_total", "KV bytes handed from P to D", registry=registry
        )
        self.placements = Counter(
            "baton_router_placements_total",
            "Epochs placed on a pair or on D alone",
            ["kind"],
            registry=registry,
        )
        self.ttft = Histogram(
            "baton_router_ttft_seconds", "Arrival to first token", buckets=_SECONDS, registry=registry
        )
        self.ttft_error = Histogram(
            "baton_router_ttft_error_seconds", "Predicted minus actual time to first token", buckets=_ERRORS,
            registry=registry,
        )  # fmt: skip
        self.latency = Histogram(
            "baton_router_request_seconds", "Arrival to last token", buckets=_SECONDS, registry=registry
        )
        self.stages = Histogram(
            "baton_router_stage_seconds", "Time in each stage, as stamped by workers", ["stage"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.said_tokens = Counter(
            "baton_router_index_said_tokens_total", "Prompt tokens that the index said to be cached",
            registry=registry,
        )  # fmt: skip
        self.found_tokens = Counter(
            "baton_router_index_found_tokens_total", "Prompt tokens of those requests that were cached",
            registry=registry,
        )  # fmt: skip
        self.cached_tokens_error = Histogram(
            "baton_router_cached_tokens_error",
            "Prompt tokens cached as the index said, less what the worker found, by request",
            buckets=_TOKENS, registry=registry,
        )  # fmt: skip
        self.peers = Gauge(
            "baton_router_peers", "Other routers whose accounts are counted", registry=registry
        )
        self.workers = Gauge("baton_router_workers", "Live workers", ["role"], registry=registry)
        self.index_pages = Gauge("baton_router_index_pages", "Pages in the global index", registry=registry)

    def follow(self, events: EventCounters) -> None:
        """Expose what an event plane counts. Once."""
        self._registry.register(_EventCollector(events))

    def observe_index(self, said: int, found: int) -> None:
        """A request's cached tokens: as the index said when it was placed, and as the worker found them."""
        self.said_tokens.inc(said)
        self.found_tokens.inc(found)
        self.cached_tokens_error.observe(said - found)

    def observe_stages(self, stamps: list[Stamp]) -> None:
        """One worker's stamps of one room: each stage lasted until the next."""
        ordered = sorted(stamps, key=lambda stamp: stamp.at_ns)
        for stamp, following in pairwise(ordered):
            self.stages.labels(str(stamp.stage)).observe((following.at_ns - stamp.at_ns) / 1e9)

    def text(self) -> bytes:
        """The Prometheus exposition."""
        return generate_latest(self._registry)


class _EventCollector(Collector):
    """Reads the event plane's own counters when Prometheus asks: its thread has nothing to do with this."""

    def __init__(self, events: EventCounters) -> None:
        self._events = events

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See Collector."""
        events = self._events
        bad = CounterMetricFamily(
            "baton_router_bad_events", "KV events that could not be used, by what is wrong", labels=["kind"]
        )
        for kind, count in list(events.bad_events.items()):
            bad.add_metric([kind], count)
        yield bad
        for name, about, count in (
            ("batches", "Batches of KV events taken", events.batches),
            ("gaps", "Batches were missing, and were asked for", events.gaps),
            ("snapshots", "A worker's pages were replaced by a snapshot", events.snapshots),
            ("resets", "A worker's pages were forgotten: what was missing could not be had", events.resets),
            ("restarts", "A publisher began anew at the same address", events.restarts),
        ):
            yield CounterMetricFamily(f"baton_router_event_{name}", about, value=count)
