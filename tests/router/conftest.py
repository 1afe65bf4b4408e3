"""A router process with fake workers in front of which tests stand."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.harness.fork import ForkedProgram
from tests.harness.processes import Child
from tests.support.fake_worker import FakeWorker
from tests.support.tokenizers import byte_level

ROOT = Path(__file__).parents[2]


@dataclass
class RouterProcess:
    """A running `python -m router`."""

    child: Child
    url: str
    mailbox: str
    http: httpx.Client
    admin: httpx.Client
    _openai: OpenAI | None = None

    @property
    def process(self) -> ForkedProgram | subprocess.Popen[bytes]:
        return self.child.process

    def openai(self) -> OpenAI:
        """The official client, made once."""
        if self._openai is None:
            self._openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self._openai

    def wait_for_workers(self, count: int, timeout_s: float = 10.0) -> None:
        """Until the router sees exactly so many."""
        wait_until(lambda: len(self.workers()) == count, timeout_s)

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin.get("/debug/workers").json()["workers"]
        return found

    def stop(self) -> int:
        self.http.close()
        self.admin.close()
        if self._openai is not None:
            self._openai.close()
        self.child.end()
        return self.child.process.wait(0.0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Polls; fails the test when the condition does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def router_options(model: Path, /, **changes: object) -> dict[str, object]:
    """Options of a router on free ports."""
    base = {"model": str(model), "served_model_name": "tiny", "port": 0, "admin_ports": "0"}
    return {**base, **changes}


def refused(directory: Path, options: dict[str, object]) -> str:
    """The one line that a router says which ends by itself."""
    told = Child("router", options, directory).refusal()
    assert told.count("\n") == 1
    return told


def start_router(directory: Path, model: Path, /, processes: int = 1, **options: object) -> RouterProcess:
    """A router on a free port."""
    given = router_options(model, **{"prefill_on_decode_tokens": 0, **options})
    child = Child("router", given, directory, arguments=("--processes", str(processes)))
    ready = child.wait_ready()
    assert ready["ready"] is True
    clients = (httpx.Client(base_url=ready[name], timeout=20.0) for name in ("http", "admin"))
    return RouterProcess(child, ready["http"], ready["mailbox"], *clients)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture
def router(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[RouterProcess]:
    """A router; parametrise indirectly with its options."""
    running = start_router(tmp_path, model, **getattr(request, "param", {}))
    yield running
    assert running.stop() == 0


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    """Put fake workers in; they are closed."""
    started: list[FakeWorker] = []
    yield started
    for worker in started:
        worker.close()
