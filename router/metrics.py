"""What the router measures. Each router has a registry of its own: two in one process must not collide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from common.tenant_labels import TenantLabels
from router.events.counters import EventCounters
from router.keys import Keys
from router.measures import Count, Distribution
from router.pair_transfers import PairTransfers
from router.placement.models import Models
from router.placement.transfer_rates import TransferPair
from router.request_metrics import SECONDS
from router.suspicions import Suspicions
from wire.loop_mailbox import LoopMailbox
from wire.messages.rooms import Timeline
from wire.records import Role, WorkerRecord
from wire.stages import RequestStage

_ERRORS = (*(-second for second in reversed(SECONDS) if second <= 30), 0, *SECONDS[:-2])
_PREFILL = (RequestStage.PREFILL_CHUNKED_FORWARD, RequestStage.PREFILL_FORWARD)
_TOKENS = (-16384, -4096, -1024, -256, -64, -1, 0, 63, 255, 1023, 4095, 16383)  # up to -1: the index lacked


class RoomMetrics:
    """Updated per room and epoch, never per token."""

    def __init__(self, registry: CollectorRegistry, tenants: TenantLabels | None = None) -> None:
        """`tenants` may be shared with other metrics."""
        self._tenants = tenants or TenantLabels()
        self.restarts = Count(registry, "baton_router_restarts", "Rooms started again")
        self.restart_causes = Count(
            registry, "baton_router_restart_causes", "Rooms started again, by the cause", "cause"
        )
        self.strays = Count(
            registry, "baton_router_stray_messages", "Messages about a room from workers that do not have it"
        )
        self.swept = Count(
            registry, "baton_router_swept_holds", "What was held and given up at its deadline", "kind"
        )
        self.kv_bytes = Count(registry, "baton_router_kv_bytes", "KV bytes handed from P to D")
        self._transfer_bytes = Count(
            registry, "baton_router_transfer_bytes", "KV bytes, by how near the two workers are", "locality"
        )
        self._transfer_seconds = Count(
            registry, "baton_router_transfer_seconds", "Seconds in which those bytes were written", "locality"
        )
        self.pair_transfers = PairTransfers(registry)
        self.placements = Count(
            registry, "baton_router_placements", "Epochs placed on a pair or on D alone", "kind"
        )
        self.moves = Count(
            registry, "baton_router_moves", "Rooms moved between decode workers with their KV", "state"
        )
        self.ttft_error = Distribution(
            registry, "baton_router_ttft_error_seconds", "Predicted minus actual time to first token", _ERRORS
        )
        self._tenant_queued = Count(
            registry, "baton_router_tenant_queue_seconds",
            "Seconds from arrival until a choice has workers, of all choices together, by tenant", "tenant",
        )  # fmt: skip
        self._queued = Distribution(
            registry, "baton_router_queue_seconds", "Arrival of a request until a choice of it has workers",
            SECONDS, "model",
        )  # fmt: skip
        self._prefill = Distribution(
            registry, "baton_router_prefill_seconds", "Forwards of a prompt on one worker, all its chunks",
            SECONDS, "model",
        )  # fmt: skip
        self._stages = Distribution(
            registry, "baton_router_stage_seconds", "Time in each stage, as stamped by workers", SECONDS,
            "stage", "role", "model",
        )  # fmt: skip
        self._said_tokens = Count(
            registry, "baton_router_index_said_tokens", "Prompt tokens that the index said to be cached"
        )
        self._found_tokens = Count(
            registry, "baton_router_index_found_tokens", "Prompt tokens of those requests that were cached"
        )
        self._cached_tokens_error = Distribution(
            registry, "baton_router_cached_tokens_error",
            "Prompt tokens cached as the index said, less what the worker found, by request", _TOKENS,
        )  # fmt: skip

    def observe_queued(self, seconds: float, model: str, tenant: str) -> None:
        """A choice has workers, so many seconds after its request came."""
        self._queued.observe(seconds, model)
        self._tenant_queued.inc(seconds, self._tenants.of(tenant))

    def observe_transfer(self, pair: TransferPair, nbytes: int, seconds: float) -> None:
        """A room's KV has come, in so many seconds with a write in progress."""
        locality = pair.locality.name.lower()
        self._transfer_bytes.inc(nbytes, locality)
        self._transfer_seconds.inc(seconds, locality)
        self.pair_transfers.observe(pair.prefill, pair.decode, nbytes, seconds)

    def observe_index(self, said: int, found: int) -> None:
        """A request's cached tokens: as the index said when it was placed, and as the worker found them."""
        self._said_tokens.inc(said)
        self._found_tokens.inc(found)
        self._cached_tokens_error.observe(said - found)

    def observe_stages(self, told: Timeline, worker: WorkerRecord | None) -> None:
        """One worker's stamps of one room: each stage lasted until the next, the last until `ended_ns`. The
        worker is None when it has left meanwhile."""
        role, model = ("", "") if worker is None else (worker.role, worker.model)
        ordered = sorted(told.stamps, key=lambda stamp: stamp.at_ns)
        ends = [stamp.at_ns for stamp in ordered[1:]] + ([told.ended_ns] if told.ended_ns else [])
        prefill_s = 0.0
        for stamp, end_ns in zip(ordered, ends, strict=False):
            seconds = max(end_ns - stamp.at_ns, 0) / 1e9
            self._stages.observe(seconds, stamp.stage, role, model)
            if stamp.stage in _PREFILL:
                prefill_s += seconds
        if prefill_s:
            self._prefill.observe(prefill_s, model)


class EventMetrics(Collector):
    """Reads the event plane's own counters when Prometheus asks: its thread has nothing to do with this."""

    def __init__(self, registry: CollectorRegistry, events: EventCounters) -> None:
        self._events = events
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
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


class OwnCounts(Collector):
    """What others count for themselves."""

    def __init__(self, registry: CollectorRegistry, keys: Keys, mailbox: LoopMailbox) -> None:
        self._keys = keys
        self._mailbox = mailbox
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Read when Prometheus asks."""
        yield CounterMetricFamily(
            "baton_router_broken_key_files",
            "Changed files of API keys that could not be read: the keys from before hold",
            self._keys.broken_files,
        )
        yield CounterMetricFamily(
            "baton_router_rejected_messages",
            "Messages of strangers, and malformed ones: they were dropped",
            self._mailbox.rejected_messages,
        )


class SuspicionMetrics(Collector):
    """Reads the suspicions when Prometheus asks."""

    def __init__(self, registry: CollectorRegistry, suspicions: Suspicions) -> None:
        self._suspicions = suspicions
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        begun = CounterMetricFamily(
            "baton_router_suspicions",
            "Workers that were not believed to be alive, by cause",
            labels=["cause"],
        )
        for cause, count in self._suspicions.counts.items():
            begun.add_metric([cause], count)
        yield begun
        yield GaugeMetricFamily(
            "baton_router_suspected", "Workers that are suspected now", value=len(self._suspicions.suspected)
        )


class VersionMetrics(Collector):
    """The models' versions, read when Prometheus asks."""

    def __init__(self, registry: CollectorRegistry, models: Models) -> None:
        self._models = models
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels = ["model", "version", "fingerprint"]
        streams = CounterMetricFamily(
            "baton_router_version_streams", "Requests that got their first token of a version", labels=labels
        )
        share = GaugeMetricFamily(
            "baton_router_version_share", "Part of a model's new streams that a version gets", labels=labels
        )
        rooms = GaugeMetricFamily(
            "baton_router_version_rooms", "Rooms of a version, also those that wait", labels=labels
        )
        for model in self._models.by_name.values():
            for version, part in model.shares():
                named = [model.name, version.name, version.fingerprint or ""]
                streams.add_metric(named, version.streams)
                share.add_metric(named, part)
                rooms.add_metric(named, version.rooms)
        yield from (streams, share, rooms)


class LevelMetrics(Collector):
    """Gauges, read from what they measure when Prometheus asks."""

    def __init__(
        self,
        registry: CollectorRegistry,
        rooms: Sized,
        waiting: Sized,
        peers: Sized,
        index: Sized,
        responses: Sized,
        workers: Callable[[], Iterable[WorkerRecord]],
    ) -> None:
        self._counted = (
            ("rooms", "Rooms in flight", rooms),
            ("queued_rooms", "Rooms that wait for their turn", waiting),
            ("peers", "Other routers whose accounts are counted", peers),
            ("index_pages", "Pages in the global index", index),
            ("kept_responses", "Answers of /v1/responses that are kept for later turns", responses),
        )
        self._workers = workers
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, about, counted in self._counted:
            yield GaugeMetricFamily(f"baton_router_{name}", about, value=len(counted))
        roles = [record.role for record in self._workers()]
        workers = GaugeMetricFamily("baton_router_workers", "Live workers", labels=["role"])
        for role in Role:
            workers.add_metric([role], roles.count(role))
        yield workers
