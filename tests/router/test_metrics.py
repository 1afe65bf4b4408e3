"""The router's metrics for Prometheus, of one process and of several."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.errors import BatonError, ModelNotFound, Overloaded
from common.tenant_labels import TenantLabels
from router.events.counters import EventCounters
from router.merged_metrics import MergedMetrics, MetricFamily, collect, exposition, merge
from router.metrics import EventMetrics, LevelMetrics, RoomMetrics, SuspicionMetrics
from router.request_metrics import RequestMetrics, cause_of
from router.suspicions import SuspicionCause, Suspicions
from router.vllm_metrics import vllm_aliases
from router.worker_metrics import WorkerMetrics
from tests.router.directory.test_directory import record
from wire.messages.rooms import Timeline
from wire.records import Counts, GroupPages, WorkerFigures, WorkerLoad
from wire.stages import RequestStage, Stamp


def values(registry: CollectorRegistry) -> dict[str, float]:
    return series(exposition(collect(registry)))


def packed(registry: CollectorRegistry) -> bytes:
    """As a process tells another what it has measured."""
    return msgspec.msgpack.encode(collect(registry))


def series(text: bytes) -> dict[str, float]:
    lines = text.decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_what_the_index_said_is_counted_against_what_was_found() -> None:
    registry = CollectorRegistry()
    metrics = RoomMetrics(registry)
    for said, found in ((160, 160), (0, 0), (320, 160), (0, 48)):
        metrics.observe_index(said, found)
    seen = values(registry)
    assert seen["baton_router_index_said_tokens_total"] == 480
    assert seen["baton_router_index_found_tokens_total"] == 368
    below = {
        bound: seen[f'baton_router_cached_tokens_error_bucket{{le="{bound}"}}']
        for bound in ("-64.0", "-1.0", "0.0", "63.0", "255.0", "+Inf")
    }
    assert seen["baton_router_cached_tokens_error_count"] == 4
    assert below == {"-64.0": 0, "-1.0": 1, "0.0": 3, "63.0": 3, "255.0": 4, "+Inf": 4}


def test_the_event_planes_counters_are_read_when_asked() -> None:
    registry, events = CollectorRegistry(), EventCounters()
    EventMetrics(registry, events)
    events.batches, events.gaps = 7, 2
    events.bad("p0", "batch", "a test")
    seen = values(registry)
    assert seen["baton_router_event_batches_total"] == 7
    assert seen["baton_router_event_gaps_total"] == 2
    assert seen["baton_router_event_resets_total"] == 0
    assert seen['baton_router_bad_events_total{kind="batch"}'] == 1


def test_stages_and_statuses_have_a_series_each() -> None:
    registry = CollectorRegistry()
    metrics, rooms = RequestMetrics(registry), RoomMetrics(registry)
    metrics.requests.inc(1, "200")
    metrics.requests.inc(1, "200")
    metrics.requests.inc(1, "429")
    stages = (RequestStage.DECODE_LOOP, RequestStage.PREFILL_WAITING, RequestStage.PREFILL_FORWARD)
    times = (3_000_000_000, 1_000_000_000, 1_500_000_000)
    stamps = [Stamp(stage, at) for stage, at in zip(stages, times, strict=True)]
    rooms.observe_stages(Timeline(1, 0, "p0", stamps, ended_ns=3_250_000_000), record("p0"))
    seen = values(registry)
    assert seen['baton_router_requests_total{status="200"}'] == 2
    assert seen['baton_router_requests_total{status="429"}'] == 1
    assert seen["baton_router_restarts_total"] == 0
    name, of = "baton_router_stage_seconds", 'model="m",role="prefill",stage='
    assert seen[f'{name}_bucket{{le="0.5",{of}"prefill_waiting"}}'] == 1  # a bound is in its bucket
    assert seen[f'{name}_bucket{{le="0.25",{of}"prefill_waiting"}}'] == 0
    assert seen[f'{name}_sum{{{of}"prefill_forward"}}'] == 1.5
    assert seen[f'{name}_count{{{of}"prefill_forward"}}'] == 1
    assert seen[f'{name}_sum{{{of}"decode_loop"}}'] == 0.25  # until the worker's part ended
    assert seen['baton_router_prefill_seconds_sum{model="m"}'] == 1.5


class Process:
    """What one of several router processes measures."""

    def __init__(self, rooms: int = 0, workers: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.requests, self.rooms = RequestMetrics(self.registry), RoomMetrics(self.registry)
        records = [record(str(number)) for number in range(workers)]
        LevelMetrics(self.registry, range(rooms), (), (), range(700), (), lambda: records)
        suspicions = Suspicions(lambda *_: None, lambda _: None)
        for one in records[:1]:
            suspicions.suspect(one, SuspicionCause.SILENT, 0.0)
        SuspicionMetrics(self.registry, suspicions)


def test_several_processes_are_measured_as_one() -> None:
    first, second = Process(rooms=2, workers=3), Process(rooms=5, workers=3)
    first.requests.requests.inc(1, "200")
    second.requests.requests.inc(2, "200")
    second.requests.requests.inc(1, "503")
    for process in (first, second):
        process.requests.ttft.observe(0.03, "m")
    merged = MergedMetrics()
    merged.take("second", collect(second.registry))
    text = exposition(merge(merged.parts(collect(first.registry))))
    seen = series(text)
    assert seen['baton_router_requests_total{status="200"}'] == 3
    assert seen['baton_router_requests_total{status="503"}'] == 1
    assert seen['baton_router_ttft_seconds_count{model="m"}'] == 2
    assert seen['baton_router_ttft_seconds_bucket{le="0.05",model="m"}'] == 2
    assert seen['baton_router_ttft_seconds_bucket{le="0.025",model="m"}'] == 0
    assert seen["baton_router_rooms"] == 7
    assert seen['baton_router_workers{role="prefill"}'] == 3  # the same in each
    assert seen["baton_router_index_pages"] == 700
    assert seen["baton_router_suspected"] == 1
    names = [line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_what_workers_have_swept_counts_once_however_many_processes_say_it() -> None:
    registries = [CollectorRegistry() for _ in range(3)]
    said = [("d0", {"output": 2, "message": 0}), ("d1", {"output": 1})]
    records = [record(name, swept=swept) for name, swept in said]
    for registry in registries:
        WorkerMetrics(registry, lambda: records)
    merged = MergedMetrics()
    for name, registry in zip(("second", "third"), registries[1:], strict=True):
        merged.take(name, collect(registry))
    merged.end("third")
    seen = series(exposition(merge(merged.parts(collect(registries[0])))))
    swept = {name: value for name, value in seen.items() if "swept" in name}
    assert swept == {
        'baton_worker_swept_holds_total{kind="output",worker="d0"}': 2,
        'baton_worker_swept_holds_total{kind="message",worker="d0"}': 0,
        'baton_worker_swept_holds_total{kind="output",worker="d1"}': 1,
    }
    records[0] = record("d0", swept={"output": 0})  # another process of that id
    merged.take("second", collect(registries[1]))
    seen = series(exposition(merge(merged.parts(collect(registries[0])))))
    assert seen['baton_worker_swept_holds_total{kind="output",worker="d0"}'] == 0


def test_what_workers_say_of_themselves_has_a_series_for_each() -> None:
    registry = CollectorRegistry()
    groups = {"full": GroupPages(total=100, free=30, evictable=50, evicted=7)}
    load = WorkerLoad(running_requests=3, free_tokens=320, since_turn_s=0.25, decoded_tokens=90)
    busy = record(
        "d0",
        load=load,
        total_tokens=400,
        draining=True,
        figures=WorkerFigures(
            groups=groups,
            retracted=2,
            cached_tokens=48,
            cached_from={"host": 16, "peer": 32},
            histograms={"forward_seconds": Counts((0.1, 1.0), (2, 1, 0), 1.5)},
        ),
    )
    WorkerMetrics(registry, lambda: [busy, record("d1")])
    seen = series(exposition(msgspec.msgpack.decode(packed(registry), type=list[MetricFamily])))
    of = f'model="{busy.model}",role="{busy.role}",worker="d0"'
    assert seen[f"baton_worker_running_requests{{{of}}}"] == 3
    assert seen[f"baton_worker_draining{{{of}}}"] == 1
    assert seen[f"baton_worker_kv_usage_ratio{{{of}}}"] == pytest.approx(0.2)
    assert seen[f"baton_worker_decode_tokens_total{{{of}}}"] == 90
    assert seen[f"baton_worker_retractions_total{{{of}}}"] == 2
    assert seen[f"baton_worker_forward_seconds_sum{{{of}}}"] == 1.5
    assert seen[f'baton_worker_forward_seconds_bucket{{le="1.0",{of}}}'] == 3
    cached = [
        seen[f'baton_worker_cached_tokens_total{{model="m",role="prefill",tier="{tier}",worker="d0"}}']
        for tier in ("device", "host", "storage", "peer")
    ]
    assert cached == [0, 16, 0, 32]
    paged = f'baton_worker_kv_pages{{group="full",model="{busy.model}",role="{busy.role}",'
    pages = {
        state: seen[f'{paged}state="{state}",tier="device",worker="d0"}}']
        for state in ("used", "cached", "free")
    }
    assert pages == {"used": 20, "cached": 50, "free": 30}
    assert (
        seen[
            'baton_worker_evicted_pages_total{group="full",model="m",role="prefill",tier="device",worker="d0"}'
        ]
        == 7
    )
    assert seen[f"baton_worker_running_requests{{{of.replace('d0', 'd1')}}}"] == 0


def test_sums_do_not_fall_when_a_process_ends_or_is_slow() -> None:
    first, second, third = Process(), Process(rooms=5), Process()
    merged = MergedMetrics()
    second.requests.output_tokens.inc(40, "m")
    merged.take("second", collect(second.registry))
    second.requests.output_tokens.inc(2, "m")

    def seen() -> tuple[float, float]:
        found = series(exposition(merge(merged.parts(collect(first.registry)))))
        return found['baton_router_output_tokens_total{model="m"}'], found["baton_router_rooms"]

    assert seen() == (40, 5)  # as it said last
    merged.take("second", collect(second.registry))
    merged.end("second")
    merged.end("second")
    assert seen() == (42, 0)
    third.requests.output_tokens.inc(1, "m")
    merged.take("third", collect(third.registry))
    assert seen() == (43, 0)
    merged.end("third")
    merged.end("never asked")
    assert seen() == (43, 0)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(ModelNotFound("x"), "model_not_found"), (Overloaded("x", 1.0, "ttft"), "overloaded_ttft")],
)
def test_a_request_that_is_refused_is_counted_by_cause(error: BatonError, cause: str) -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.rejected(error)
    assert cause_of(error) == cause
    assert values(registry)[f'baton_router_rejects_total{{cause="{cause}"}}'] == 1


def test_vllms_names_say_the_same() -> None:
    registry = CollectorRegistry()
    requests, rooms = RequestMetrics(registry, ["m"]), RoomMetrics(registry)
    figures = WorkerFigures(retracted=2, histograms={"batch_tokens": Counts((1.0, 8.0), (1, 2, 3), 99.0)})
    WorkerMetrics(registry, lambda: [record("p0", figures=figures, load=WorkerLoad(waiting_requests=5))])
    requests.ttft.observe(0.03, "m")
    requests.finished.inc(3, "m", "stop")
    stamps = [Stamp(RequestStage.PREFILL_WAITING, 1), Stamp(RequestStage.PREFILL_FORWARD, 500_000_001)]
    for worker in ("p0", "p1"):
        rooms.observe_stages(Timeline(1, 0, worker, stamps, ended_ns=600_000_001), record(worker))
    seen = series(exposition(list(vllm_aliases(collect(registry)))))
    of = 'engine="router",model_name="m"'
    assert seen[f"vllm:time_to_first_token_seconds_count{{{of}}}"] == 1
    assert seen['vllm:time_to_first_token_seconds_bucket{engine="router",le="0.05",model_name="m"}'] == 1
    assert seen['vllm:request_success_total{engine="router",finished_reason="stop",model_name="m"}'] == 3
    assert seen[f"vllm:request_queue_time_seconds_sum{{{of}}}"] == 1.0
    assert seen[f"vllm:e2e_request_latency_seconds_count{{{of}}}"] == 0  # there before the first request
    worker = 'engine="p0",model_name="m"'
    assert seen[f"vllm:num_requests_waiting{{{worker}}}"] == 5
    assert seen[f"vllm:num_preemptions_total{{{worker}}}"] == 2
    assert seen[f"vllm:iteration_tokens_total_sum{{{worker}}}"] == 99
    assert any(name.startswith("vllm:cache_config_info{block_size=") for name in seen)


def test_tenants_beyond_the_most_are_counted_together() -> None:
    registry, labels = CollectorRegistry(), TenantLabels(["named"], most=2)
    requests, rooms = RequestMetrics(registry, tenants=labels), RoomMetrics(registry, labels)
    for tenant in ("first", "second", "", "named", "third", "first"):
        requests.ended(tenant, prompt_tokens=10, cached_tokens=4)
        rooms.observe_queued(0.5, "m", tenant)
    figures = WorkerFigures(tenant_pages={"first": 3, "second": 2, "third": 1, "": 5}, other_tenants_pages=7)
    WorkerMetrics(registry, lambda: [record("d0", figures=figures)], labels)
    seen = values(registry)

    def by_tenant(name: str) -> dict[str, float]:
        found = {label: seen.get(f'{name}{{tenant="{label}"}}') for label in TENANT_LABELS}
        return {label: value for label, value in found.items() if value is not None}

    counts = {"named": 1, "first": 2, "anonymous": 1, "other": 2}
    assert by_tenant("baton_router_tenant_requests_total") == counts
    assert by_tenant("baton_router_tenant_prompt_tokens_total") == {k: 10 * n for k, n in counts.items()}
    assert by_tenant("baton_router_tenant_cached_tokens_total") == {k: 4 * n for k, n in counts.items()}
    assert by_tenant("baton_router_tenant_queue_seconds_total") == {k: n / 2 for k, n in counts.items()}
    assert seen['baton_router_queue_seconds_count{model="m"}'] == 6
    of = 'baton_worker_tenant_pages{model="m",role="prefill",tenant='
    assert {label: seen.get(f'{of}"{label}",worker="d0"}}') for label in TENANT_LABELS} == {
        "named": None, "first": 3, "second": None, "third": None, "anonymous": 5, "other": 10,
    }  # fmt: skip


TENANT_LABELS = ("named", "first", "second", "third", "anonymous", "other")
