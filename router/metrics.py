"""What the router counts, in a registry of its own (two routers in one process must not collide)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.events.counters import EventCounters
from router.measures import Count, Distribution
from wire.stages import Stamp

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ERRORS = (*(-second for second in reversed(_SECONDS) if second <= 30), 0, *_SECONDS[:-2])
_TOKENS = (-16384, -4096, -1024, -256, -64, -1, 0, 63, 255, 1023, 4095, 16383)  # up to -1: the index lacked


class RouterMetrics:
    """Updated per request, never per token."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Count(registry, "baton_router_requests", "Requests by HTTP status", "status")
        self.restarts = Count(registry, "baton_router_restarts", "Rooms started again")
        self.aborts = Count(registry, "baton_router_aborts", "Requests ended by their client")
        self.prompt_tokens = Count(registry, "baton_router_prompt_tokens", "Prompt tokens")
        self.cached_tokens = Count(
            registry, "baton_router_cached_tokens", "Prompt tokens that were not computed"
        )
        self.output_tokens = Count(registry, "baton_router_output_tokens", "Output tokens")
        self.kv_bytes = Count(registry, "baton_router_kv_bytes", "KV bytes handed from P to D")
        self.placements = Count(
            registry, "baton_router_placements", "Epochs placed on a pair or on D alone", "kind"
        )
        self.ttft = Distribution(registry, "baton_router_ttft_seconds", "Arrival to first token", _SECONDS)
        self.ttft_error = Distribution(
            registry, "baton_router_ttft_error_seconds", "Predicted minus actual time to first token", _ERRORS
        )
        self.latency = Distribution(
            registry, "baton_router_request_seconds", "Arrival to last token", _SECONDS
        )
        self.stages = Distribution(
            registry, "baton_router_stage_seconds", "Time in each stage, as stamped by workers", _SECONDS,
            "stage",
        )  # fmt: skip
        self.said_tokens = Count(
            registry, "baton_router_index_said_tokens", "Prompt tokens that the index said to be cached"
        )
        self.found_tokens = Count(
            registry, "baton_router_index_found_tokens", "Prompt tokens of those requests that were cached"
        )
        self.cached_tokens_error = Distribution(
            registry, "baton_router_cached_tokens_error",
            "Prompt tokens cached as the index said, less what the worker found, by request", _TOKENS,
        )  # fmt: skip
        self.rooms = Gauge("baton_router_rooms", "Rooms in flight", registry=registry)
        self.queued_rooms = Gauge(
            "baton_router_queued_rooms", "Rooms that wait for their turn", registry=registry
        )
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
            self.stages.observe((following.at_ns - stamp.at_ns) / 1e9, stamp.stage)

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
