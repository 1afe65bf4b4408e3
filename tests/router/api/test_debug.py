"""The windows into a router's choices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.records import Role

Service = tuple[RouterProcess, FakeWorker, FakeWorker]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """One prefill and one decode worker."""
    router = start_router(tmp_path_factory.mktemp("debug"), model, trusted_tenant_header="X-Baton-Tenant")
    p, d = (FakeWorker(role, router.mailbox) for role in (Role.PREFILL, Role.DECODE))
    router.wait_for_workers(2)
    yield router, p, d
    p.close()
    d.close()
    assert router.stop() == 0


def test_a_choice_is_explained(service: Service) -> None:
    router, p, d = service
    route = router.admin.get("/debug/route", params={"prompt": "Hello"}).json()
    assert route["policy"] == "kv"
    assert route["prompt_tokens"] == len(
        router.http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    )
    assert route["winner"] == {
        "prefill": {"id": p.record.id, "hit_tokens": 0},
        "decode": {"id": d.record.id, "hit_tokens": 0},
    }
    (first,) = route["prefill"]
    assert first.pop("cost") > 0
    assert first == {
        "id": p.record.id, "held_tokens": {"device": 0, "host": 0, "storage": 0, "expected": 0},
        "queued_prefill_tokens": 0, "requests": 0, "context_tokens": 0, "session": False,
    }  # fmt: skip
    (second,) = route["decode"]
    assert second["id"] == d.record.id
    assert second["cost"] > 0
    assert second["alone_cost"] is None
    assert router.admin.get("/debug/route").status_code == 400


def test_workers_that_the_index_may_know_in_part_are_named(service: Service) -> None:
    router, *_ = service
    assert router.admin.get("/debug/workers").json()["unsure"] == []
    told = FakeWorker(Role.PREFILL, router.mailbox, events="nonsense")
    try:
        wait_until(lambda: router.admin.get("/debug/workers").json()["unsure"] == [told.record.id])
    finally:
        told.close()
    wait_until(lambda: router.admin.get("/debug/workers").json()["unsure"] == [])


def test_a_session_is_a_header_the_prompt_cache_key_or_what_an_agent_calls_it(service: Service) -> None:
    router, *_ = service
    body: dict[str, object] = {"prompt": "Hello", "max_tokens": 2}
    asked = [
        router.http.post("/v1/completions", json=body, headers={"X-Baton-Session": "one"}),
        router.http.post(
            "/v1/completions",
            json={**body, "prompt_cache_key": "two"},
            headers={"X-Baton-Tenant": "somebody"},
        ),
        router.http.post("/generate", json={"text": "Hello"}, headers={"X-Baton-Session": "three"}),
        router.http.post("/v1/completions", json=body, headers={"X-Claude-Code-Session-Id": "five"}),
        router.http.post(
            "/v1/completions",
            json={**body, "prompt_cache_key": "six"},
            headers={"Session-Id": "seven", "X-Session-Affinity": "eight" * 100},
        ),
        router.http.post("/v1/completions", json=body, headers={"Session-Id": "nine"}),
    ]
    assert [answer.status_code for answer in asked] == [200] * 6

    def known(session: str, tenant: str = "") -> bool:
        query = {"prompt": "Hello", "session": session, "tenant": tenant}
        route = router.admin.get("/debug/route", params=query).json()
        (first,), (second,) = route["prefill"], route["decode"]
        assert first["session"] == second["session"]
        return bool(first["session"])

    assert [known("one"), known("two", "somebody"), known("three")] == [True] * 3
    assert [known("five"), known("six"), known("nine")] == [True] * 3
    assert [known("two"), known("four"), known("seven")] == [False] * 3


def test_a_silent_room_shows_what_its_workers_said_of_it(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    """Decode has its pages and waits for prefill, which takes for ever."""
    p = FakeWorker(Role.PREFILL, router.mailbox, prefill_s=3600.0)
    d = FakeWorker(Role.DECODE, router.mailbox)
    workers += [p, d]
    router.wait_for_workers(2)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}, "stream": True}

    def shown() -> list[tuple[str, str, str]]:
        rooms = router.admin.get("/debug/rooms").json()["rooms"]
        return [(one["id"], one["stage"], one["waits_for"]) for room in rooms for one in room["workers"]]

    expected = [
        (p.record.id, "prefill_waiting", d.record.mailbox),
        (d.record.id, "decode_bootstrap", p.record.mailbox),
    ]
    with router.http.stream("POST", "/generate", json=body, headers={"X-Request-Id": "slow"}):
        wait_until(lambda: shown() == expected, 20.0)
        trace = router.admin.get("/debug/trace/slow").json()
        statuses = trace["otherData"]["statuses"]
        assert {one["worker"]: one["said"]["stage"] for one in statuses} == {
            p.record.id: "prefill_waiting", d.record.id: "decode_bootstrap",
        }  # fmt: skip
    wait_until(lambda: router.admin.get("/debug/rooms").json()["rooms"] == [])
