"""What the router says of itself to Prometheus."""

from __future__ import annotations

from router.event_counters import EventCounters
from router.metrics import RouterMetrics


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
