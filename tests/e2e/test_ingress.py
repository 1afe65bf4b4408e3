"""The router behind HAProxy, as deploy/cluster.yaml sets it, with workers that have no model."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from bench.router_rig import ROOT, served_router, workers

_BODY = {"prompt": "Hello", "ignore_eos": True}


def _aborts(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("baton_router_aborts_total"))


@pytest.mark.e2e
def test_haproxy_passes_streams_errors_and_a_client_that_leaves() -> None:
    with (
        TemporaryDirectory(prefix="b-", dir="/tmp") as scratch,  # short: sockets lie in it
        served_router(ROOT / "deploy/demo_model", "m", Path(scratch), "haproxy") as (at, directory),
        workers(at, directory, step_ms=20.0),
        httpx.Client(base_url=at.url, timeout=30.0) as client,
    ):
        answer = client.post(
            "/v1/completions", json={**_BODY, "max_tokens": 3}, headers={"x-request-id": "mine"}
        )
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.json()["usage"]["completion_tokens"] == 3
        wrong = client.post("/v1/completions", json={**_BODY, "frobnicate": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "frobnicate")
        with client.stream("POST", "/v1/completions", json={**_BODY, "max_tokens": 5, "stream": True}) as got:
            events = [line for line in got.iter_lines() if line]
        assert (len(events), events[-1]) == (6, "data: [DONE]")
        with client.stream(
            "POST", "/v1/completions", json={**_BODY, "max_tokens": 5000, "stream": True}
        ) as got:
            next(got.iter_lines())
        deadline = time.monotonic() + 20
        while _aborts(client) < 1:
            assert time.monotonic() < deadline, "nobody has told the workers to abort"
            time.sleep(0.05)
