"""RequestLog: what it measures when the wall clock is set back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from router.merged_metrics import collect, exposition
from router.request_metrics import RequestMetrics
from router.streams import request_log
from router.streams.request_log import RequestLog
from router.trace import TraceStore
from tests.router.streams.test_generation import Request, gained

S = 10**9
ARRIVED = 10**18


@pytest.mark.parametrize(
    ("first_at", "last_at", "ttft", "decode", "latency"),
    [
        (2, 5, 2.0, 3.0, 5.0),
        (-30, -27, 0.0, 0.0, 0.0),  # set back before the first token
        (2, -25, 2.0, 0.0, 2.0),  # and after it
    ],
)
def test_no_time_is_negative(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    first_at: int,
    last_at: int,
    ttft: float,
    decode: float,
    latency: float,
) -> None:
    times = iter((ARRIVED, ARRIVED + first_at * S, ARRIVED + last_at * S))
    monkeypatch.setattr(request_log, "time", SimpleNamespace(time_ns=lambda: next(times)))
    registry, traces = CollectorRegistry(), TraceStore()
    log = RequestLog(traces, RequestMetrics(registry), Mock())
    request = Request(model)
    submission = msgspec.structs.replace(request.generation.submission, arrived_ns=ARRIVED)
    request.generation.submission = submission

    log.submitted(submission, [1])
    request.outputs[0].on_tokens(gained(70), 0)
    log.began(request.generation)
    log.ended(request.generation)

    sums = {
        name: float(line.split()[-1])
        for line in exposition(collect(registry)).decode().splitlines()
        for name in ("ttft", "decode", "request")
        if line.startswith(f"baton_router_{name}_seconds_sum")
    }
    assert sums == {"ttft": ttft, "decode": decode, "request": latency}
    summary = traces.newest(1)[0]
    assert (summary.ttft_ms, summary.total_ms) == (1e3 * ttft, 1e3 * latency)
