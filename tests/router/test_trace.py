"""Which requests' traces are kept."""

from __future__ import annotations

from itertools import islice

import pytest

from router import trace as traces
from router.trace import RequestTrace, TraceStore
from wire.messages.rooms import Timeline
from wire.stages import RequestStage, Stamp


def opened(store: TraceStore, number: int, request_id: str = "") -> RequestTrace:
    trace = RequestTrace(request_id or f"r{number}", [number], 1, [])
    store.open(trace)
    return trace


def timeline(room: int) -> Timeline:
    return Timeline(room, 0, "d", [Stamp(RequestStage.DECODE_LOOP, 1)], 10**9)


def kept(store: TraceStore) -> list[str]:
    return [summary.request_id for summary in islice(reversed(store.newest(100)), 100)]


def test_a_request_that_runs_is_not_forgotten_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timelines come when it ends, and figures of the whole router are taken from them."""
    monkeypatch.setattr(traces, "_KEPT", 3)
    store = TraceStore()
    long = opened(store, 0)
    for number in range(1, 10):
        store.ended(opened(store, number), {})
    assert kept(store) == ["r0", "r7", "r8", "r9"]
    store.ended(long, {})
    assert kept(store) == ["r0", "r8", "r9"], "the one that ended first has gone"
    assert store.add_timeline(timeline(0))
    assert not store.add_timeline(timeline(7))


def test_a_request_id_that_comes_twice_has_the_later_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_KEPT", 1)
    store = TraceStore()
    first, second = opened(store, 1, "same"), opened(store, 2, "same")
    store.ended(first, {})
    store.ended(opened(store, 3), {})
    store.ended(opened(store, 4), {})
    assert kept(store) == ["same", "r4"], "the later one of the two runs"
    assert store.get("same") is second
    assert not store.add_timeline(timeline(1))
    assert store.add_timeline(timeline(2))


def test_requests_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_MOST", 4)
    store = TraceStore()
    for number in range(6):
        opened(store, number)
    assert kept(store) == ["r2", "r3", "r4", "r5"]
