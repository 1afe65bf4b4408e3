"""The router as a process: light, exact about bad configuration, and mountable in another application."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from router import __main__ as router_main
from router.api.app import build_app
from router.options import RouterOptions
from router.service import Router
from tests.router.conftest import ROOT, RouterProcess, refused, router_options

pytestmark = pytest.mark.slow

# Runs the real entry point; says at the end which modules it has loaded.
_RUN = """
import atexit, json, runpy, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules))))
sys.argv = ["router", "--options", sys.argv[1]]
runpy.run_module("router", run_name="__main__")
"""


def test_neither_torch_nor_transformers_is_loaded(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(router_options(model)))
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    request = urllib.request.Request(f"{ready['http']}/tokenize", body)
    with urllib.request.urlopen(request, timeout=10) as response:
        assert json.loads(response.read())["count"] > 0
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=15)
    modules = set(json.loads(rest))
    assert process.returncode == 0
    assert "router.service" in modules
    assert not modules & {"torch", "transformers", "ray", "starlette"}


def test_a_port_in_use(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, router_options(model, port=port))
    assert f"port: 127.0.0.1:{port} is in use; choose another" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"polciy": "kv"}, "polciy: unknown key"),
        ({"policy": "best"}, "policy: 'best' is unknown; choose one of kv"),
        ({"max_in_flight": 0}, "max_in_flight: "),
        ({"model": "/nowhere"}, "model: /nowhere has no tokenizer.json"),
        ({"weights": {"transfer": -1}}, "weights.transfer: "),
    ],
)
def test_options_that_cannot_work(
    tmp_path: Path, model: Path, changes: dict[str, object], words: str
) -> None:
    assert words in refused(tmp_path, router_options(model, **changes))


def test_mounted_in_another_application(model: Path) -> None:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        router = Router(RouterOptions(model=model, served_model_name="tiny"))
        app.mount("/llm", build_app(router))
        yield
        router.close()

    with TestClient(Starlette(lifespan=lifespan)) as client:
        assert client.get("/llm/health").json() == {"status": "ok"}
        assert client.get("/llm/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/llm/ready").status_code == 503


def test_a_router_that_follows_no_events_any_more_says_so(model: Path) -> None:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        router = Router(RouterOptions(model=model, served_model_name="tiny"))
        router._events.close()
        app.mount("/llm", build_app(router))
        yield
        router.close()

    with TestClient(Starlette(lifespan=lifespan)) as client:
        answers = [client.get(f"/llm/{path}") for path in ("health", "ping")]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "the thread that follows KV events has ended" in answers[0].json()["error"]["message"]


def test_such_a_process_of_several_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another takes its place."""
    monkeypatch.setattr(router_main, "freeze_gc", lambda: None)

    async def run() -> None:
        router = Router(RouterOptions(model=model, served_model_name="tiny"))
        router._events.close()
        told, tell = os.pipe()
        with socket.create_server(("127.0.0.1", 0)) as listener, os.fdopen(told) as until, os.fdopen(tell):
            await asyncio.wait_for(router_main._serve_api(router, listener, None, "", until), 10.0)

    asyncio.run(run())


def test_an_idle_connection_outlives_that_of_an_openai_client(router: RouterProcess) -> None:
    """Else a request may go out on a connection that the router is just closing."""
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=kept_s + 0.5)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        with pytest.raises(TimeoutError):
            connection.sock.recv(1)
