"""A request that runs for longer than the operator allows: what its client is told, and that it ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.records import Role

LIMIT_S = 2.0  # a request that nothing holds up takes milliseconds
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 20, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20},
    "/v1/responses": {"input": "a", "max_output_tokens": 20},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 20}},
}
ROOMS = 6  # of all of them


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[RouterProcess, FakeWorker]]:
    router = start_router(tmp_path_factory.mktemp("limit"), model, max_request_s=LIMIT_S)
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=512, step_s=0.001)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


@pytest.fixture
def held(service: tuple[RouterProcess, FakeWorker]) -> Iterator[FakeWorker]:
    """The worker, which sends two tokens of every request and no more until the test has ended."""
    _, worker = service
    worker.wait_at, before = 2, len(worker.aborted)
    yield worker
    worker.wait_at = None
    assert len(worker.aborted) > before


def test_a_request_that_ends_in_time_is_answered(service: tuple[RouterProcess, FakeWorker]) -> None:
    router, worker = service
    before = len(worker.aborted)
    for path, body in BODIES.items():
        assert router.http.post(path, json=body).status_code == 200
    assert len(worker.aborted) == before


def asked_together(router: RouterProcess, stream: bool) -> dict[str, httpx.Response]:
    with ThreadPoolExecutor(len(BODIES)) as threads:

        def ask(path: str) -> httpx.Response:
            return httpx.post(f"{router.url}{path}", json={**BODIES[path], "stream": stream}, timeout=60.0)

        return dict(zip(BODIES, threads.map(ask, BODIES), strict=True))


def test_one_that_does_not_fails_at_every_door(
    service: tuple[RouterProcess, FakeWorker], held: FakeWorker
) -> None:
    router, _ = service
    before = len(held.aborted)
    for path, answer in asked_together(router, stream=False).items():
        assert answer.status_code == 504, answer.text
        error = answer.json()["error"]
        assert "has run for 2 s" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "timeout_error"
        else:
            assert error["code"] == "time_limit"
        assert answer.headers["x-should-retry"] == "false"
    wait_until(lambda: len(held.aborted) == before + ROOMS)


def test_a_stream_ends_with_the_error(service: tuple[RouterProcess, FakeWorker], held: FakeWorker) -> None:
    router, _ = service
    before = len(held.aborted)
    for answer in asked_together(router, stream=True).values():
        assert answer.status_code == 200
        *came, last = (event for event in answer.text.split("\n\n") if event)
        assert came
        assert "has run for 2 s" in last
    wait_until(lambda: len(held.aborted) == before + ROOMS)


def test_openais_client_does_not_ask_again(
    service: tuple[RouterProcess, FakeWorker], held: FakeWorker
) -> None:
    router, _ = service
    before = len(held.aborted)
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=3)
    with client, pytest.raises(openai.InternalServerError, match="has run for 2 s"):
        client.completions.create(model=router.http.get("/v1/models").json()["data"][0]["id"], prompt="a")
    wait_until(lambda: len(held.aborted) == before + 1)
