"""What the router says of itself to Prometheus."""

from __future__ import annotations

from router.events.counters import EventCounters
from router.metrics import RouterMetrics
from wire.stages import RequestStage, Stamp


def values(metrics: RouterMetrics) -> dict[str, float]:
    lines = metrics.text().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_what_the_index_said_is_counted_against_what_was_found() -> None:
    metrics = RouterMetrics()
    for said, found in ((160, 160), (0, 0), (320, 160), (0, 48)):
        metrics.observe_index(said, found)
    seen = values(metrics)
    assert seen["baton_router_index_said_tokens_total"] == 480
    assert seen["baton_router_index_found_tokens_total"] == 368
    below = {
        bound: seen[f'baton_router_cached_tokens_error_bucket{{le="{bound}"}}']
        for bound in ("-64.0", "-1.0", "0.0", "63.0", "255.0", "+Inf")
    }
    assert seen["baton_router_cached_tokens_error_count"] == 4
    assert below == {"-64.0": 0, "-1.0": 1, "0.0": 3, "63.0": 3, "255.0": 4, "+Inf": 4}


def test_the_event_planes_counters_are_read_when_asked() -> None:
    metrics, events = RouterMetrics(), EventCounters()
    metrics.follow(events)
    events.batches, events.gaps = 7, 2
    events.bad("p0", "batch", "a test")
    seen = values(metrics)
    assert seen["baton_router_event_batches_total"] == 7
    assert seen["baton_router_event_gaps_total"] == 2
    assert seen["baton_router_event_resets_total"] == 0
    assert seen['baton_router_bad_events_total{kind="batch"}'] == 1


def test_stages_and_statuses_have_a_series_each() -> None:
    metrics = RouterMetrics()
    metrics.requests.inc(of="200")
    metrics.requests.inc(of="200")
    metrics.requests.inc(of="429")
    stages = (RequestStage.DECODE_LOOP, RequestStage.PREFILL_WAITING, RequestStage.PREFILL_FORWARD)
    times = (3_000_000_000, 1_000_000_000, 1_500_000_000)
    metrics.observe_stages([Stamp(stage, at) for stage, at in zip(stages, times, strict=True)])
    seen = values(metrics)
    assert seen['baton_router_requests_total{status="200"}'] == 2
    assert seen['baton_router_requests_total{status="429"}'] == 1
    assert seen["baton_router_restarts_total"] == 0
    name = "baton_router_stage_seconds"
    assert seen[f'{name}_bucket{{le="0.5",stage="prefill_waiting"}}'] == 1  # a bound is in its bucket
    assert seen[f'{name}_bucket{{le="0.25",stage="prefill_waiting"}}'] == 0
    assert seen[f'{name}_sum{{stage="prefill_forward"}}'] == 1.5
    assert seen[f'{name}_count{{stage="prefill_forward"}}'] == 1
    assert not any("decode_loop" in series for series in seen), "its end has not been stamped"
    assert seen["baton_router_ttft_seconds_count"] == 0
