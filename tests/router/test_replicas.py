"""Two router processes in front of the same workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.messages.rooms import Decode, Prefill
from wire.records import Role

EACH = 4  # P and D


@dataclass
class Cluster:
    """The second router watches the directory of the first."""

    routers: list[RouterProcess]
    workers: list[FakeWorker]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("replicas")
    first = start_router(path, model, policy="least-loaded")
    second = start_router(path, model, policy="least-loaded", directory=first.mailbox)
    workers = [FakeWorker(role, first.mailbox, prefill_s=0.3) for role in Role for _ in range(EACH)]
    for router in (first, second):
        router.wait_for_workers(2 * EACH)
    yield Cluster([first, second], workers)
    for worker in workers:
        worker.close()
    assert [second.stop(), first.stop()] == [0, 0]


def accounts(router: RouterProcess, whose: str) -> dict[str, dict[str, int]]:
    found: list[dict[str, Any]] = router.admin.get("/debug/workers").json()["accounts"]
    return {account["id"]: account[whose] for account in found}


def requests(router: RouterProcess, whose: str) -> int:
    return sum(given["requests"] for given in accounts(router, whose).values())


def given(workers: list[FakeWorker], kind: type[Prefill | Decode]) -> list[int]:
    """Rooms that each worker of the role was sent."""
    role = Role.PREFILL if kind is Prefill else Role.DECODE
    return [worker.count(kind) for worker in workers if worker.record.role is role]


def generate(router: RouterProcess, number: int) -> None:
    body = {"text": f"prompt {number}", "sampling_params": {"max_new_tokens": 3}}
    answer = router.http.post("/generate", json=body)
    assert answer.status_code == 200


def all_over(routers: list[RouterProcess]) -> bool:
    return all(
        not any(any(given.values()) for given in accounts(router, whose).values())
        for router in routers
        for whose in ("own", "peers")
    )


def test_what_one_has_placed_the_other_counts(cluster: Cluster) -> None:
    for worker in cluster.workers:
        worker.silent = True
    with ThreadPoolExecutor(EACH) as pool:
        running = []
        for number in range(EACH):
            here, there = cluster.routers[number % 2], cluster.routers[1 - number % 2]
            running.append(pool.submit(generate, here, number))
            wait_until(lambda: requests(here, "own") + requests(here, "peers") == number + 1)  # noqa: B023
            wait_until(lambda: accounts(there, "peers") == accounts(here, "own"))  # noqa: B023
        for worker in cluster.workers:
            worker.silent = False
        for one in running:
            one.result(20.0)
    assert given(cluster.workers, Prefill) == given(cluster.workers, Decode) == [1] * EACH
    wait_until(lambda: all_over(cluster.routers))


def test_a_burst_over_both_is_spread(cluster: Cluster) -> None:
    """No worker gets more than twice its share of 32 requests that come at once."""
    before = {kind: given(cluster.workers, kind) for kind in (Prefill, Decode)}
    with ThreadPoolExecutor(32) as pool:
        for one in [pool.submit(generate, cluster.routers[number % 2], number) for number in range(32)]:
            one.result(20.0)
    for kind, earlier in before.items():
        counts = [now - then for now, then in zip(given(cluster.workers, kind), earlier, strict=True)]
        assert sum(counts) == 32
        assert max(counts) <= 2 * 32 / EACH, counts
    wait_until(lambda: all_over(cluster.routers))
