"""`baton trace` where several routers are there, of which some cannot be asked."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import top, trace_command
from cluster.trace_command import find_trace
from common.errors import ConfigError, WorkerLost

_HERE, _GONE, _SLOW, _THERE = (f"http://127.0.0.1:{port}" for port in (9110, 9111, 9112, 9113))


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four: one keeps the trace `there`. One cannot be reached, and one does not answer."""

    def admin_json(url: str, path: str, _key: str | None) -> Any:
        if path == "/admin/routers":
            ports = [one.removeprefix("http://") for one in (_HERE, _GONE, _SLOW, _THERE)]
            return [{"targets": ports, "labels": {"__scheme__": "http"}}]
        if url == _GONE:
            raise ConfigError("--url", f"nothing answers at {url}: refused", "give another")
        if url == _SLOW:
            raise WorkerLost("the router answers 503")
        if url == _THERE and path.endswith("/there"):
            return {"traceEvents": []}
        raise ConfigError("worker", f"no trace of request {path.rpartition('/')[2]!r} is kept", "show all")

    for module in (top, trace_command):
        monkeypatch.setattr(module, "admin_json", admin_json)


def test_a_trace_is_found_behind_routers_that_cannot_be_asked(routers: None) -> None:
    assert find_trace(_HERE, None, "there") == {"traceEvents": []}


def test_a_request_that_nobody_knows_is_named_with_those_that_cannot_be_asked(routers: None) -> None:
    with pytest.raises(ConfigError) as refused:
        find_trace(_HERE, None, "nowhere")
    assert refused.value.key == "REQUEST"
    assert refused.value.problem == (
        f"no trace of request 'nowhere' is kept; nothing answers at {_GONE}: refused; {_SLOW} does not answer"
    )
