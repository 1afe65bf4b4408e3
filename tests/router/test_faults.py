"""Faults of messages and workers: every token still comes exactly once, and is the right one."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker, Faults, expected_tokens
from wire.codec import pack_tokens
from wire.messages.rooms import Decode, Prefill, RejectKind
from wire.records import Role, WorkerLoad

QUICK = {
    "silence_s": 0.2, "lease_s": 0.8, "receipt_timeout_s": 2.0, "max_restarts": 5, "worker_wait_s": 8.0,
    "hold_prefill_s": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RouterProcess]:
    """One router for these tests: the faults of one test must not affect the next."""
    running = start_router(tmp_path_factory.mktemp("faults"), model, **QUICK)
    yield running
    assert running.stop() == 0


@pytest.fixture
def router(shared: RouterProcess) -> RouterProcess:
    """The shared router, without workers."""
    shared.wait_for_workers(0)
    return shared


@pytest.fixture
def own_router(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[RouterProcess]:
    """A router of the test's own; parametrise indirectly with further options."""
    running = start_router(tmp_path, model, **{**QUICK, **request.param})
    yield running
    assert running.stop() == 0


def ask(router: RouterProcess, prompt: list[int], count: int) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": count}}
    response = router.http.post("/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    output: list[int] = response.json()["output_ids"]
    return output


def right(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(pack_tokens(prompt), count)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(duplicate=0.5),
        Faults(delay=0.5),
        Faults(drop=0.15),
        Faults(drop=0.1, duplicate=0.2, delay=0.3),
    ],
    ids=["duplicated", "reordered", "dropped", "everything"],
)
def test_messages_between_all_three_may_misbehave(
    router: RouterProcess, workers: list[FakeWorker], faults: Faults
) -> None:
    for number in range(2):
        settings = {"drop": faults.drop, "duplicate": faults.duplicate, "delay": faults.delay}
        workers += [
            FakeWorker(Role.PREFILL, router.mailbox, faults=Faults(seed=number, **settings)),
            FakeWorker(
                Role.DECODE, router.mailbox, faults=Faults(seed=10 + number, **settings), step_s=0.002
            ),
        ]
    router.wait_for_workers(4)
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: ask(router, prompt, 30), prompts))
    assert answers == [right(prompt, 30) for prompt in prompts]


def restarts(router: RouterProcess) -> float:
    found = re.search(r"^baton_router_restarts_total (\S+)", router.admin.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def in_background(router: RouterProcess, prompts: list[list[int]], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]

    def one(i: int) -> None:
        answers[i] = ask(router, prompts[i], count)

    for i in range(len(prompts)):
        threading.Thread(target=one, args=(i,), daemon=True).start()
    return answers


@pytest.mark.parametrize("way", ["die", "drain"])
@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_a_worker_that_goes_loses_no_token(
    router: RouterProcess, workers: list[FakeWorker], way: str, role: Role
) -> None:
    slow = {"step_s": 0.02, "prefill_s": 0.1, "announce_s": 0.1}
    workers += [FakeWorker(r, router.mailbox, **slow) for r in (Role.PREFILL, Role.DECODE) for _ in range(2)]  # type: ignore[arg-type]
    router.wait_for_workers(4)
    before = restarts(router)
    prompts = [[i] for i in range(8)]
    answers = in_background(router, prompts, 50)
    victim = next(worker for worker in workers if worker.record.role is role)
    kind = Decode if role is Role.DECODE else Prefill
    wait_until(lambda: victim.count(kind) >= 2)
    getattr(victim, way)()
    wait_until(lambda: all(answers), 30)
    assert answers == [right(prompt, 50) for prompt in prompts]
    if role is Role.DECODE:
        assert restarts(router) > before


def test_a_silent_worker_is_left_for_another(router: RouterProcess, workers: list[FakeWorker]) -> None:
    workers += [FakeWorker(Role.DECODE, router.mailbox), FakeWorker(Role.DECODE, router.mailbox)]
    router.wait_for_workers(2)
    workers[0].silent = True
    for i in range(2):
        assert ask(router, [i], 5) == right([i], 5)


@pytest.mark.parametrize("why", [RejectKind.FAILED, RejectKind.OVERLOADED, RejectKind.UNKNOWN])
def test_a_rejecting_worker_is_left_for_another(
    router: RouterProcess, workers: list[FakeWorker], why: RejectKind
) -> None:
    workers += [
        FakeWorker(Role.PREFILL, router.mailbox, reject=why),
        FakeWorker(Role.PREFILL, router.mailbox),
        FakeWorker(Role.DECODE, router.mailbox, reject=why),
        FakeWorker(Role.DECODE, router.mailbox),
    ]
    router.wait_for_workers(4)
    for i in range(4):
        assert ask(router, [i], 5) == right([i], 5)


def test_what_all_workers_reject_is_told_to_the_client(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    workers.append(FakeWorker(Role.DECODE, router.mailbox, reject=RejectKind.INVALID))
    router.wait_for_workers(1)
    body = {"prompt": "a", "max_tokens": 2}
    assert router.http.post("/v1/completions", json=body).status_code == 400
    workers[0].reject = RejectKind.OVERLOADED
    response = router.http.post("/v1/completions", json=body, timeout=60)
    assert response.status_code == 429
    assert "retry-after" in response.headers


def test_a_request_waits_for_a_worker_and_ends_on_it(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    answers = in_background(router, [[1]], 5)
    wait_until(lambda: "baton_router_rooms 1.0" in router.admin.get("/metrics").text)
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    wait_until(lambda: bool(answers[0]))
    assert answers[0] == right([1], 5)


def test_a_first_token_that_ends_the_request_releases_decode(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    p = FakeWorker(Role.PREFILL, router.mailbox, eos_at=0)
    d = FakeWorker(Role.DECODE, router.mailbox)
    workers += [p, d]
    router.wait_for_workers(2)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}}
    answer = router.http.post("/generate", json=body).json()
    assert answer["output_ids"] == right([1, 2], 1)
    assert answer["text"] == ""  # the stop token is no text
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][0]}
    wait_until(lambda: d.open_rooms() == 0)


@pytest.mark.parametrize("own_router", [{"hold_prefill_s": 3600}], indirect=True)
def test_prefill_waits_for_reserved_when_decode_is_full(
    own_router: RouterProcess, workers: list[FakeWorker]
) -> None:
    router = own_router
    p = FakeWorker(Role.PREFILL, router.mailbox)
    d = FakeWorker(Role.DECODE, router.mailbox, load=WorkerLoad(headroom_tokens=0))
    workers += [p, d]
    router.wait_for_workers(2)
    assert ask(router, [1], 5) == right([1], 5)
    (decode,) = {m.request.epoch: m for m in d.seen if isinstance(m, Decode)}.values()
    (prefill,) = {m.request.epoch: m for m in p.seen if isinstance(m, Prefill)}.values()
    assert decode.request == prefill.request  # of the only epoch: P was told at Reserved


def test_many_clients_that_leave_leave_nothing_behind(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    p, d = FakeWorker(Role.PREFILL, router.mailbox), FakeWorker(Role.DECODE, router.mailbox, step_s=0.005)
    workers += [p, d]
    router.wait_for_workers(2)

    async def leave(client: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": [i], "max_tokens": 1000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                return

    async def all_leave() -> None:
        async with httpx.AsyncClient(base_url=router.url, timeout=20) as client:
            await asyncio.gather(*(leave(client, i) for i in range(20)))

    asyncio.run(all_leave())
    wait_until(lambda: len(d.aborted) == 20 and len(p.aborted) == 20)
    assert d.open_rooms() == 0
    accounts = router.admin.get("/debug/workers").json()["accounts"]
    assert all(account["own"]["requests"] == 0 for account in accounts)
