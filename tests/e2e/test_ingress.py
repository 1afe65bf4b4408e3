"""The router behind HAProxy, as deploy/cluster.yaml sets it, with workers that have no model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from bench.router_rig import ROOT, served_router
from router.keys import API_KEYS_ENV
from tests.support.fake_worker import FakeWorker
from tests.support.sse import DONE, sse_events
from wire.records import Role

_KEY = "a key for this test only"
_BODY = {"prompt": "Hello", "ignore_eos": True}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _aborts(admin: httpx.Client) -> float:
    lines = admin.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("baton_router_aborts_total"))


def _servers(haproxy: Path) -> set[str]:
    """What HAProxy passes requests on to: the router's replica, and Serve's own proxy if there is none."""
    (config,) = haproxy.rglob("haproxy.cfg")
    found = re.findall(r"^\s*server\s+\S+\s+(\S+:\d+)", config.read_text(), re.MULTILINE)
    return {f"http://{address}" for address in found}


@pytest.mark.e2e
def test_haproxy_passes_streams_errors_and_a_client_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEYS_ENV, _KEY)
    with (
        TemporaryDirectory(prefix="b-", dir="/tmp") as scratch,  # short: sockets lie in it
        served_router(ROOT / "deploy/demo_model", "m", Path(scratch), "haproxy") as (at, directory),
        closing(FakeWorker(Role.PREFILL, directory, model="m", max_context=8192)),
        closing(FakeWorker(Role.DECODE, directory, model="m", max_context=8192, step_s=0.02)),
        httpx.Client(base_url=at.url, headers={"Authorization": f"Bearer {_KEY}"}, timeout=30.0) as client,
        httpx.Client(base_url=at.admin, timeout=30.0) as admin,
    ):
        wait_until(lambda: len(admin.get("/debug/workers").json()["workers"]) == 2)
        answer = client.post(
            "/v1/completions", json={**_BODY, "max_tokens": 3}, headers={"x-request-id": "mine"}
        )
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.json()["usage"]["completion_tokens"] == 3
        wrong = client.post("/v1/completions", json={**_BODY, "frobnicate": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "frobnicate")
        with client.stream("POST", "/v1/completions", json={**_BODY, "max_tokens": 5, "stream": True}) as got:
            events = list(sse_events(got.iter_lines()))
        assert (len(events), events[-1].data) == (6, DONE)
        with client.stream(
            "POST", "/v1/completions", json={**_BODY, "max_tokens": 5000, "stream": True}
        ) as got:
            next(got.iter_lines())
        wait_until(lambda: _aborts(admin) >= 1)
        behind = _servers(Path(scratch, "haproxy")) - {at.url}
        assert behind
        for url in (at.url, *behind):  # the replicas' ports are open to other nodes
            assert httpx.post(f"{url}/v1/completions", json=_BODY).status_code == 401
