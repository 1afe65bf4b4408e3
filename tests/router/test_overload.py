"""An overloaded router: answers to clients, the order of rooms, and recovery."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker, expected_tokens
from wire.codec import pack_tokens
from wire.messages.rooms import Decode, Prefill
from wire.records import Role, WorkerLoad

FULL = WorkerLoad(running_requests=4)  # no headroom
IDLE = WorkerLoad(
    free_tokens=1 << 20,
    headroom_tokens=1 << 20,
    headroom_rows=99,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
)


class Crowd:
    """Clients in threads, each with a prompt of its own."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.pool = ThreadPoolExecutor(40)
        self.answers: dict[tuple[int, int], Future[httpx.Response]] = {}

    def ask(self, prompt: int, tenant: str = "a", priority: int = 0, tokens: int = 3) -> None:
        body = {"input_ids": [prompt], "sampling_params": {"max_new_tokens": tokens}, "priority": priority}
        send = self.router.http.post
        headers = {"x-baton-tenant": tenant}
        self.answers[prompt, tokens] = self.pool.submit(
            send, "/generate", json=body, headers=headers, timeout=60
        )

    def assert_answered(self) -> None:
        for (prompt, tokens), answer in self.answers.items():
            response = answer.result(timeout=30)
            assert response.status_code == 200, response.text
            assert response.json()["output_ids"] == expected_tokens(pack_tokens([prompt]), tokens)

    def close(self) -> None:
        self.pool.shutdown()


def gauge(router: RouterProcess, name: str) -> float:
    found = re.search(rf"^{name} (\S+)", router.admin.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def queued(router: RouterProcess) -> float:
    return gauge(router, "baton_router_queued_rooms")


def order(worker: FakeWorker) -> list[int]:
    """Prompts in the order in which the worker was sent them."""
    seen: dict[int, None] = {}
    for message in list(worker.seen):
        if isinstance(message, Decode):
            seen.setdefault(int.from_bytes(message.request.prompt[:4], "little"))
    return list(seen)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RouterProcess]:
    """One place, and a queue for a full decode worker."""
    options = {"max_in_flight": 1, "max_queued": 40, "max_queue_s": 60, "queue_decode_full": True}
    running = start_router(
        tmp_path_factory.mktemp("overload"), model, trusted_tenant_header="X-Baton-Tenant", **options
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def crowd(narrow: RouterProcess) -> Iterator[Crowd]:
    narrow.wait_for_workers(0)
    made = Crowd(narrow)
    yield made
    made.close()


def full_worker(router: RouterProcess, workers: list[FakeWorker]) -> FakeWorker:
    workers.append(FakeWorker(Role.DECODE, router.mailbox, load=FULL, announce_s=0.05))
    router.wait_for_workers(1)
    return workers[-1]


def announce(worker: FakeWorker, load: WorkerLoad) -> None:
    """With its next renewal."""
    worker.record = msgspec.structs.replace(worker.record, load=load)


def test_one_tenants_burst_leaves_the_others_their_turns(
    narrow: RouterProcess, workers: list[FakeWorker], crowd: Crowd
) -> None:
    worker = full_worker(narrow, workers)
    for prompt in range(25):
        crowd.ask(prompt, "greedy")
    wait_until(lambda: queued(narrow) == 25)
    crowd.ask(100, "modest")
    wait_until(lambda: queued(narrow) == 26)
    crowd.ask(101, "other", priority=-5)  # which counts within a tenant only
    wait_until(lambda: queued(narrow) == 27)
    assert order(worker) == []
    announce(worker, IDLE)
    crowd.assert_answered()
    served = order(worker)
    assert len(served) == 27
    assert served.index(100) <= 2
    assert served.index(101) <= 2


def test_full_workers_are_told_how_many_rooms_wait_for_them(
    narrow: RouterProcess, workers: list[FakeWorker], crowd: Crowd
) -> None:
    """Autoscaling asks workers alone."""
    workers += [FakeWorker(Role.DECODE, narrow.mailbox, load=FULL, announce_s=0.05) for _ in range(2)]
    workers.append(FakeWorker(Role.PREFILL, narrow.mailbox, announce_s=0.05))
    narrow.wait_for_workers(3)
    for prompt in range(5):
        crowd.ask(prompt)
    wait_until(lambda: [one.waiting for one in workers] == [2.5, 2.5, 0.0])
    for worker in workers[:2]:
        announce(worker, IDLE)
    crowd.assert_answered()
    wait_until(lambda: not any(one.waiting for one in workers))


def test_a_client_that_leaves_the_queue_is_never_sent_to_a_worker(
    narrow: RouterProcess, workers: list[FakeWorker], crowd: Crowd
) -> None:
    worker = full_worker(narrow, workers)
    crowd.ask(1)
    wait_until(lambda: queued(narrow) == 1)
    leave_after(narrow, {"prompt": [2], "max_tokens": 5, "stream": True}, 0.3)
    wait_until(lambda: queued(narrow) == 1)
    crowd.ask(3)
    wait_until(lambda: queued(narrow) == 2)
    announce(worker, IDLE)
    crowd.assert_answered()
    assert order(worker) == [1, 3]


def leave_after(router: RouterProcess, body: dict[str, object], seconds: float) -> None:
    with httpx.Client(base_url=router.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=httpx.Timeout(10, read=seconds))


def test_wrong_requests_and_leavers_cost_nobody_a_place(
    narrow: RouterProcess, workers: list[FakeWorker], crowd: Crowd
) -> None:
    worker = full_worker(narrow, workers)
    for _ in range(60):
        assert narrow.http.post("/v1/completions", json={"prompt": [1], "max_tokens": -1}).status_code == 400
    for prompt in range(10):
        leave_after(narrow, {"prompt": [prompt], "max_tokens": 5}, 0.05)
    wait_until(lambda: queued(narrow) == 0 and gauge(narrow, "baton_router_rooms") == 0)
    announce(worker, IDLE)
    crowd.ask(20)
    crowd.assert_answered()


@pytest.mark.parametrize("router", [{"max_in_flight": 2, "max_queued": 10, "max_queue_s": 60}], indirect=True)
def test_rooms_of_a_lost_worker_go_before_those_that_wait(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    leaving = FakeWorker(Role.DECODE, router.mailbox, step_s=0.02)
    workers.append(leaving)
    router.wait_for_workers(1)
    crowd = Crowd(router)
    for prompt in (1, 2):
        crowd.ask(prompt, tokens=100)
    wait_until(lambda: len(order(leaving)) == 2)
    for prompt in range(3, 13):
        crowd.ask(prompt)
    wait_until(lambda: queued(router) == 10)
    heir = FakeWorker(Role.DECODE, router.mailbox, step_s=0.02)
    workers.append(heir)
    router.wait_for_workers(2)
    leaving.drain()
    crowd.assert_answered()
    assert sorted(order(leaving)) == [1, 2]
    assert sorted(order(heir)[:2]) == [1, 2]
    assert len(order(heir)) == 12
    crowd.close()


@pytest.mark.parametrize("router", [{"max_in_flight": 1, "max_queued": 5, "max_queue_s": 0.3}], indirect=True)
def test_the_queue_has_an_end(router: RouterProcess, workers: list[FakeWorker]) -> None:
    workers.append(FakeWorker(Role.DECODE, router.mailbox, step_s=0.05))
    router.wait_for_workers(1)
    crowd = Crowd(router)
    crowd.ask(1, tokens=30)
    wait_until(lambda: gauge(router, "baton_router_rooms") == 1)
    late = router.http.post("/v1/completions", json={"prompt": [2], "max_tokens": 3})
    assert late.status_code == 429
    assert int(late.headers["retry-after"]) >= 1
    assert "within 0.3 s" in late.json()["error"]["message"]
    crowd.assert_answered()
    assert router.http.post("/v1/completions", json={"prompt": [2], "max_tokens": 3}).status_code == 200
    crowd.close()


@pytest.mark.parametrize("router", [{"max_ttft_s": 2.0}], indirect=True)
def test_what_would_be_too_late_is_refused_and_served_when_the_load_has_gone(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    busy = msgspec.structs.replace(IDLE, queued_prefill_tokens=60_000)
    p = FakeWorker(Role.PREFILL, router.mailbox, load=busy, announce_s=0.05)
    # An idle D would compute the prompt in P's place.
    d = FakeWorker(Role.DECODE, router.mailbox, load=busy, announce_s=0.05)
    workers += [p, d]
    router.wait_for_workers(2)
    body = {"prompt": list(range(100)), "max_tokens": 3}
    refused = router.http.post("/v1/completions", json=body)
    assert refused.status_code == 429
    assert 40 <= int(refused.headers["retry-after"]) <= 59
    assert refused.json()["error"]["code"] == "overloaded"
    route = router.admin.get("/debug/route", params={"prompt": "Hello"}).json()
    assert 40 < route["predicted_ttft_s"] <= 61
    assert p.count(Prefill) == d.count(Decode) == 0
    announce(p, IDLE)
    announce(d, IDLE)
    wait_until(lambda: router.http.post("/v1/completions", json=body).status_code == 200)
    for _ in range(5):
        assert router.http.post("/v1/completions", json=body).status_code == 200
    assert gauge(router, "baton_router_ttft_error_seconds_count") >= 6
