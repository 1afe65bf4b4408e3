"""Queues that are projected to the present time."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.index.global_index import GlobalIndex
from router.placement.fleet_table import FleetTable
from router.placement.load_estimate import WorkerLoadEstimate
from tests.router.directory.test_directory import record
from wire.records import Role, WorkerLoad

reports = st.tuples(
    st.integers(0, 100_000), st.floats(0, 1e5), st.floats(0, 1e6), st.integers(0, 50_000)
)  # tokens queued, tokens a second, when, tokens assigned since


@given(st.lists(reports, max_size=8), st.floats(0, 1e6))
def test_a_queue_is_the_report_less_what_was_computed_since_and_what_was_assigned(
    fleet: list[tuple[int, float, float, int]], now: float
) -> None:
    estimates, queues = [], []
    for number, (queued, rate, at, since) in enumerate(fleet):
        load = WorkerLoad(queued_prefill_tokens=queued, prefill_tokens_per_s=rate)
        estimate = WorkerLoadEstimate(record(f"w{number}", load=load), at)
        estimate.prefill(since, at)
        estimates.append(estimate)
        queues.append(max(0.0, queued - rate * (now - at)) + since)
    prefill, decode = FleetTable(estimates, GlobalIndex()).project(now)
    assert prefill.queued.tolist() == pytest.approx(queues, rel=1e-9, abs=1e-2)
    assert len(decode) == 0


def test_a_decode_worker_has_the_rows_that_it_said() -> None:
    load = WorkerLoad(headroom_tokens=1000, headroom_rows=2)
    estimate = WorkerLoadEstimate(record("d", role=Role.DECODE, load=load), 0.0)
    for left in (True, True, False):
        assert estimate.fits(100) is left
        estimate.decode(100, 0.0)
