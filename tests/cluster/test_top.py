"""The figures of `baton top`, from metrics in Prometheus's format."""

from __future__ import annotations

import dataclasses
from io import StringIO

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from cluster.top_table import frame
from router.dashboard.figures import Samples, Snapshot, added, fleet_figures, in_order, kv_use, parse_samples
from router.measures import Count, Distribution
from router.metrics import RoomMetrics
from router.placement.transfer_rates import Locality, TransferPair
from router.request_metrics import RequestMetrics
from tests.router.directory.test_directory import record
from wire.records import Role, WorkerLoad

BOUNDS = (0.01, 0.1, 1.0, 10.0)


def samples(registry: CollectorRegistry) -> Samples:
    return parse_samples(generate_latest(registry).decode())


def snapshot(samples: Samples, at: float = 0.0) -> Snapshot:
    load = WorkerLoad(free_tokens=25, running_requests=3, queued_prefill_tokens=1234, decode_step_s=0.02)
    workers = [record("d1", role=Role.DECODE, load=load, rack="r7"), record("p1", draining=True)]
    return Snapshot(at, samples, workers, ["http://one"], ["http://two"])


def observed(values: list[float], name: str = "seen") -> Samples:
    registry = CollectorRegistry()
    distribution = Distribution(registry, name, "", BOUNDS)
    for value in values:
        distribution.observe(value)
    return samples(registry)


@given(st.lists(st.floats(0, 10), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_in_the_bucket_of_its_value(values: list[float], share: float) -> None:
    found = observed(values).quantile("seen", share)
    rank = next(n for n in range(1, len(values) + 1) if n >= share * len(values))
    exact = sorted(values)[rank - 1]
    upper = next(bound for bound in BOUNDS if exact <= bound)
    lower = max((bound for bound in (0.0, *BOUNDS) if bound < upper), default=0.0)
    assert found is not None
    assert lower <= found <= upper


def test_a_quantile_is_interpolated_among_the_values_of_its_bucket() -> None:
    assert observed([0.05] * 5 + [0.5] * 5).quantile("seen", 0.75) == pytest.approx(0.55)


def test_quantiles_of_nothing_and_beyond_the_last_bucket() -> None:
    assert observed([]).quantile("seen", 0.5) is None
    assert observed([1000.0]).quantile("seen", 0.5) == 10.0
    assert Samples({}).quantile("seen", 0.5) is None


@given(st.lists(st.lists(st.floats(0, 10), max_size=5), max_size=3))
def test_routers_are_added(several: list[list[float]]) -> None:
    together = observed([value for values in several for value in values])
    apart = added([observed(values) for values in several])
    assert apart.total("seen_count") == together.total("seen_count")
    for share in (0.5, 0.95):
        assert apart.quantile("seen", share) == together.quantile("seen", share)


def test_a_router_that_began_anew_counts_from_zero() -> None:
    registry = CollectorRegistry()
    count = Count(registry, "n", "", "of")
    count.inc(5, "a")
    before = samples(registry)
    count.inc(2, "a")
    count.inc(1, "b")
    grown = samples(registry).since(before)
    assert grown.by("n_total", "of") == {"a": 2.0, "b": 1.0}
    assert before.since(samples(registry)).by("n_total", "of") == {"a": 5.0}


def metrics() -> tuple[CollectorRegistry, RequestMetrics, RoomMetrics]:
    registry = CollectorRegistry()
    return registry, RequestMetrics(registry), RoomMetrics(registry)


def test_figures_are_of_the_time_between_two_snapshots() -> None:
    registry, requests, rooms = metrics()
    requests.prompt_tokens.inc(1000, "m")
    requests.ttft.observe(50.0, "m")
    before = snapshot(samples(registry), at=10.0)
    requests.requests.inc(6, "200")
    requests.requests.inc(2, "429")
    requests.prompt_tokens.inc(400, "m")
    requests.cached_tokens.inc(100, "m")
    requests.output_tokens.inc(80, "m")
    requests.ttft.observe(0.2, "m")
    requests.itl.observe(0.02, "m")
    rooms.kv_bytes.inc(4_000_000_000)
    rooms.observe_transfer(TransferPair("p", "d", Locality.RACK), 4_000_000_000, 2.0)
    fleet = fleet_figures(snapshot(samples(registry), at=14.0), before)
    assert (fleet.requests_s, fleet.output_tokens_s, fleet.hit_rate) == (2.0, 20.0, 0.25)
    assert fleet.statuses == {"429": 2.0}
    assert fleet.transfers == {"rack": 2e9}
    assert fleet.transfer_bytes_s == 1e9
    assert all(value is not None and 0.1 < value <= 0.25 for value in fleet.ttft_s)
    assert all(value is not None and 0.01 < value <= 0.025 for value in fleet.itl_s)


GAUGES = """
# TYPE baton_router_rooms gauge
baton_router_rooms{process="0"} 7
baton_router_rooms{process="1"} 2
# TYPE baton_router_queued_rooms gauge
baton_router_queued_rooms 4
# TYPE baton_router_suspected gauge
baton_router_suspected 1
"""


def counted(restarts: int, errors: int) -> Samples:
    """What is now, and what has been counted since the start."""
    return parse_samples(
        f"""{GAUGES}
# TYPE baton_router_restarts_total counter
baton_router_restarts_total {restarts}
# TYPE baton_router_requests_total counter
baton_router_requests_total{{process="0",status="503"}} {errors}
baton_router_requests_total{{process="1",status="503"}} {errors}
baton_router_requests_total{{process="1",status="400"}} 9
# TYPE baton_worker_cached_tokens_total counter
baton_worker_cached_tokens_total{{worker="p0",tier="device"}} {100 * errors}
baton_worker_cached_tokens_total{{worker="p1",tier="peer"}} {300 * errors}
baton_worker_cached_tokens_total{{worker="p1",tier="storage"}} 7
"""
    )


def test_what_is_now_is_no_difference_and_what_is_counted_is() -> None:
    now, before = snapshot(counted(12, 30), at=2.0), snapshot(counted(5, 10))
    fleet = fleet_figures(now, before)
    assert (fleet.rooms, fleet.queued, fleet.suspected, fleet.restarts) == (9.0, 4.0, 1.0, 7.0)
    assert fleet.statuses == {"503": 40.0}, "of both processes; none of those that were there before"
    assert fleet.requests_s == 20.0
    assert fleet.cached_from == {"device": 0.25, "peer": 0.75}, "of what was found since"
    assert fleet_figures(now, None).statuses == {"503": 60.0, "400": 9.0}
    assert now.samples.total("baton_router_requests_total", process="1") == 39.0
    assert now.samples.total("baton_router_requests_total", process="1", status="503") == 30.0


def test_each_percentile_is_its_own() -> None:
    registry, requests, _ = metrics()
    for n in range(100):
        requests.itl.observe(0.02 if n < 90 else 0.2 if n < 97 else 3.0, "m")
    p50, p95, p99 = fleet_figures(snapshot(samples(registry)), None).itl_s
    assert p50 is not None
    assert p95 is not None
    assert p99 is not None
    assert p50 < 0.03 < p95 < 0.3 < p99


def test_a_hit_rate_of_nothing_cached_is_zero() -> None:
    registry, requests, _ = metrics()
    requests.prompt_tokens.inc(10, "m")
    assert fleet_figures(snapshot(samples(registry)), None).hit_rate == 0.0


def test_the_frame_shows_the_fleet() -> None:
    registry, requests, rooms = metrics()
    requests.prompt_tokens.inc(10, "m")
    rooms.observe_transfer(TransferPair("p", "d", Locality.RACK), 4_000_000_000, 2.0)
    file = StringIO()
    now = snapshot(added([counted(1, 3), samples(registry)]))
    Console(file=file, width=140).print(frame(now, None))
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert "rooms 9 run, 4 wait in routers" in lines
    assert "workers 1 prefill, 1 decode, 1 suspected" in lines
    assert "transfer - rack 2 GB/s" in lines
    assert "hit rate 0.0% 25% from device 75% from peer 1% from storage" in lines
    assert "errors 9 x 400 6 x 503 1 restarts" in lines


def test_what_was_not_counted_is_not_shown_as_zero() -> None:
    fleet = fleet_figures(snapshot(samples(metrics()[0])), None)
    assert (fleet.requests_s, fleet.hit_rate, fleet.ttft_s) == (None, None, (None, None, None))


def test_the_frame_shows_every_worker_in_order() -> None:
    now = snapshot(samples(metrics()[0]))
    now = dataclasses.replace(now, workers=[*now.workers, record("d0", role=Role.DECODE)])
    assert [one.id for one in in_order(now.workers)] == ["p1", "d0", "d1"]
    file = StringIO()
    Console(file=file, width=140).print(frame(now, None))
    lines = [line.split() for line in file.getvalue().splitlines()]
    (prefill,) = (line for line in lines if line[:1] == ["p1"])
    (decode,) = (line for line in lines if line[:1] == ["d1"])
    assert prefill[1:3] == ["prefill", "(drains)"]
    assert decode == ["d1", "decode", "h", "r7", "1,234", "3/1", "0", "75%", "-", "20.0ms"]
    assert ["routers", "1", "answer,", "1", "silent"] in lines
    assert ["workers", "1", "prefill,", "2", "decode"] in lines


def test_kv_use_is_a_share() -> None:
    one = record("d")
    assert [
        kv_use(replace(one, load=WorkerLoad(free_tokens=free))) for free in (100, 120, 40, -5)
    ] == pytest.approx([0.0, 0.0, 0.6, 1.05])
