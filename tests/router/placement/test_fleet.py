"""Queues that project: in C++ as in numpy, to the last bit."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from router.index.global_index import GlobalIndex
from router.index.native.build import native
from router.placement.fleet_table import FleetTable
from router.placement.load_estimate import WorkerLoadEstimate
from tests.router.directory.test_directory import record
from wire.records import WorkerLoad

reports = st.tuples(
    st.integers(0, 100_000), st.floats(0, 1e5), st.floats(0, 1e6), st.integers(0, 50_000)
)  # tokens queued, tokens a second, when, tokens placed since


@settings(deadline=None)
@given(st.lists(reports, max_size=8), st.floats(0, 1e6))
def test_both_project_the_same(fleet: list[tuple[int, float, float, int]], now: float) -> None:
    estimates = []
    for number, (queued, rate, at, since) in enumerate(fleet):
        load = WorkerLoad(queued_prefill_tokens=queued, prefill_tokens_per_s=rate)
        estimate = WorkerLoadEstimate(record(f"w{number}", load=load), at)
        estimate.prefill(since, at)
        estimates.append(estimate)
    table = FleetTable(estimates, GlobalIndex())
    compiled = table.project(now)[0].queued.copy()
    table._project(now)
    assert compiled.tolist() == table._queued.tolist()


def test_figures_of_another_shape_are_refused() -> None:
    module = native()
    assert module is not None
    with pytest.raises(ValueError, match=r"figures are float64 \[7, workers\]"):
        module.project(np.zeros((4, 7)), 0.0)
    with pytest.raises(TypeError, match="2 arguments"):
        module.project(np.zeros((7, 1)))
