"""The admin listener: what only operators see is on a port of its own, behind a key of its own."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.router.conftest import RouterProcess, refused, router_options, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.records import Role

pytestmark = pytest.mark.slow
KEY = "an admin key of some length"
OTHER = "another admin key of that length"
PATHS = [
    "/metrics", "/admin/routers", "/debug/workers", "/debug/route?prompt=Hello",
    "/debug/inspect?worker=WORKER", "/debug/rooms", "/debug/leases", "/debug/suspicions", "/debug/trace/one",
    "/debug/requests", "/debug/index?worker=WORKER",
]  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module", params=["open", "with a key", "two processes"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[RouterProcess, FakeWorker, bool]]:
    """A router, its one worker, and whether the admin listener has a key."""
    directory = tmp_path_factory.mktemp("admin")
    has_key = request.param != "open"
    options = {}
    if has_key:
        (directory / "key").write_text(f"{KEY}\n")
        options["admin_key_file"] = str(directory / "key")
    router = start_router(directory, model, 2 if request.param == "two processes" else 1, **options)
    if has_key:
        router.admin.headers.update(bearer(KEY))
    worker = FakeWorker(Role.DECODE, router.mailbox)
    router.wait_for_workers(1)
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    assert router.http.post("/generate", json=body, headers={"X-Request-Id": "one"}).status_code == 200
    yield router, worker, has_key
    worker.close()
    assert router.stop() == 0


@pytest.fixture
def service(running: tuple[RouterProcess, FakeWorker, bool]) -> tuple[RouterProcess, str, bool]:
    """The router, the worker's id, and whether the admin listener has a key."""
    router, worker, has_key = running
    return router, worker.record.id, has_key


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_the_operators_alone(service: tuple[RouterProcess, str, bool], path: str) -> None:
    router, worker, has_key = service
    path = path.replace("WORKER", worker)
    assert router.http.get(path, headers=bearer(KEY)).status_code == 404, "not at the API's port"
    wait_until(lambda: router.admin.get(path).status_code == 200)  # another process may see the worker later
    for headers in ({}, bearer(OTHER), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        answer = httpx.get(f"{router.admin.base_url}{path}", headers=headers, timeout=20.0)
        assert answer.status_code == (401 if has_key else 200)
        if has_key:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_caches_are_cleared_by_the_operator_alone(service: tuple[RouterProcess, str, bool]) -> None:
    router, worker, has_key = service
    path = "/admin/cache/clear"
    assert httpx.post(f"{router.admin.base_url}{path}?tier=no").status_code == (401 if has_key else 400)
    assert router.admin.post(path, headers={"Origin": "http://example.org"}).status_code == 401
    assert router.admin.get(path).status_code == 404
    wait_until(lambda: router.admin.post(f"{path}?worker={worker}").status_code == 200)
    for query, tiers in (("", ("device", "host", "storage")), ("?tier=host", ("host",))):
        answer = router.admin.post(path + query)
        freed = {worker: dict.fromkeys(tiers, 3)}
        assert answer.json() == {"freed": freed, "problems": {}, "silent": []}
    assert "nobody" in router.admin.post(f"{path}?worker=nobody").json()["error"]["message"]


@pytest.fixture
def held(running: tuple[RouterProcess, FakeWorker, bool]) -> Iterator[FakeWorker]:
    """The worker, which sends two tokens of every request and no more until the test has ended."""
    _, worker, _ = running
    worker.wait_at = 2
    yield worker
    worker.wait_at = None


def generate(router: RouterProcess, request_id: str, stream: bool, n: int = 2) -> httpx.Response:
    params = {"max_new_tokens": 20, "n": n, "ignore_eos": True}
    body = {"text": request_id, "sampling_params": params, "stream": stream}
    return httpx.post(f"{router.url}/generate", json=body, headers={"X-Request-Id": request_id}, timeout=60.0)


def test_the_operator_ends_requests(
    running: tuple[RouterProcess, FakeWorker, bool], held: FakeWorker
) -> None:
    router, _, has_key = running
    path = "/admin/requests/abort"
    assert httpx.post(f"{router.admin.base_url}{path}?all=true").status_code == (401 if has_key else 200)
    assert router.admin.post(f"{path}?id=a", headers={"Origin": "http://example.org"}).status_code == 401
    for wrong in ("", "?id=", "?all=false", "?id=a&all=true"):
        assert router.admin.post(path + wrong).json()["error"]["param"] == "id"
    assert router.admin.post(f"{path}?id=none").json() == {"aborted": []}
    with ThreadPoolExecutor(4) as threads:

        def begin(stream: bool, *names: str) -> dict[str, Future[httpx.Response]]:
            """Requests of two choices, each of which has its first tokens."""
            begun = {name: threads.submit(generate, router, name, stream) for name in names}
            wait_until(lambda: sorted(progress(router)) == sorted([*names, *names]))
            return begun

        asked = begin(False, "a", "b")
        assert router.admin.post(f"{path}?id=b").json() == {"aborted": ["b"]}
        answer = asked["b"].result(20.0)
        assert answer.status_code == 410
        assert answer.json()["error"]["code"] == "aborted"
        assert sorted(progress(router)) == ["a", "a"]
        assert router.admin.post(f"{path}?all=true").json() == {"aborted": ["a"]}
        assert asked["a"].result(20.0).status_code == 410
        asked = begin(True, "c", "d", "e")
        assert router.admin.post(f"{path}?all=true").json() == {"aborted": ["c", "d", "e"]}
        for streamed in asked.values():
            events = [event for event in streamed.result(20.0).text.split("\n\n") if event]
            assert sum('"meta_info"' in event for event in events) >= 2, "what had come was told"
            assert '"aborted"' in events[-1] or '"aborted"' in events[-2]
        wait_until(lambda: len(held.aborted) == 10)


def progress(router: RouterProcess) -> list[str]:
    """The requests of the rooms that have two tokens."""
    rooms = router.admin.get("/debug/rooms").json()["rooms"]
    return [room["request_id"] for room in rooms if room["tokens"] == 2]


def test_a_tenant_is_forgotten_by_the_operator_alone(service: tuple[RouterProcess, str, bool]) -> None:
    router, worker, has_key = service
    path = "/admin/tenants/a%2Fb%3F%20c/forget"
    assert httpx.post(f"{router.admin.base_url}{path}").status_code == (401 if has_key else 200)
    assert router.admin.post(path, headers={"Origin": "http://example.org"}).status_code == 401
    assert router.admin.get(path).status_code == 405
    wait_until(lambda: worker in router.admin.post(path).json()["workers"])
    first, second = (router.admin.post(path).json() for _ in range(2))
    assert (first["tenant"], first["told"], first["silent"]) == ("a/b? c", True, [])
    assert second["generation"] > first["generation"] > 0
    assert first["workers"][worker] == {
        "nodes": 2, "removed": {"device": {"pages": 5, "bytes": 640}}, "locked_pages": 1, "unfinished": [],
        "problem": "",
    }  # fmt: skip
    assert router.admin.post(f"/admin/tenants/{'x' * 257}/forget").status_code == 400
    assert router.admin.post("/admin/tenants//forget").status_code == 405


def test_the_dashboard_is_open_and_what_it_reads_is_not(service: tuple[RouterProcess, str, bool]) -> None:
    router, worker, has_key = service
    for path, kind in (
        ("/", "text/html"),
        ("/dashboard.js", "text/javascript"),
        ("/dashboard.css", "text/css"),
    ):
        answer = httpx.get(f"{router.admin.base_url}{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    if has_key:
        assert httpx.get(f"{router.admin.base_url}/admin/live").status_code == 401
    with router.admin.stream("GET", "/admin/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        (event,) = islice((line for line in answer.iter_lines() if line.startswith("data: ")), 1)
    view = json.loads(event.removeprefix("data: "))
    assert [one["id"] for one in view["workers"]] == [worker]
    assert "one" in [one["request_id"] for one in view["requests"]]
    assert view["requests"][0]["decode"] == worker


def test_the_playground_may_read_the_apis_answers(service: tuple[RouterProcess, str, bool]) -> None:
    router, *_ = service
    ours = str(router.admin.base_url).rstrip("/")
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for origin, status in ((ours, 204), ("http://example.org", 405)):
        answer = router.http.options("/v1/chat/completions", headers={"Origin": origin, **asks})
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (ours if origin == ours else None)


def test_the_api_is_not_at_the_admin_port(service: tuple[RouterProcess, str, bool]) -> None:
    router, *_ = service
    assert [router.admin.get(path).status_code for path in ("/v1/models", "/health", "/debug")] == [404] * 3
    assert router.admin.post("/v1/completions", json={"prompt": "a"}).status_code == 405


def test_a_name_that_leads_to_this_machine_is_refused(router: RouterProcess) -> None:
    """As a page in a browser would ask that has bound its own name to loopback."""
    for host, status in (("evil.example:80", 401), ("localhost:9110", 200), ("[::1]:9110", 200)):
        assert router.admin.get("/debug/workers", headers={"Host": host}).status_code == status


def test_routers_find_each_other_and_take_different_ports(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        ports = f"{first}-{min(first + 20, 65535)}"
        one = start_router(tmp_path, model, admin_ports=ports)
        two = start_router(tmp_path, model, admin_ports=ports, directory=one.mailbox)
    targets = sorted(str(router.admin.base_url.netloc, "ascii") for router in (one, two))
    assert len({*targets, f"127.0.0.1:{first}"}) == 3
    expected = [{"targets": targets, "labels": {"__scheme__": "http"}}]
    wait_until(lambda: one.admin.get("/admin/routers").json() == expected)
    assert [one.stop(), two.stop()] == [0, 0]


def test_a_new_key_holds_without_a_restart(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    router = start_router(tmp_path, model, admin_key_file=str(file))

    def status(key: str) -> int:
        return router.admin.get("/metrics", headers=bearer(key)).status_code

    assert (status(KEY), status(OTHER)) == (200, 401)
    file.write_text("short")  # a broken file changes nothing
    time.sleep(1.2)  # longer than between two looks
    assert (status(KEY), status("short")) == (200, 401)
    file.write_text(f"{OTHER}\n")
    wait_until(lambda: status(OTHER) == 200)
    assert status(KEY) == 401
    assert router.stop() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"admin_host": "0.0.0.0"}, "admin_host: 0.0.0.0 is not loopback, and there is no key"),
        ({"admin_key_file": "/nowhere"}, "admin_key_file: cannot read /nowhere"),
        ({"admin_ports": "9-1"}, "admin_ports: 9-1 is not a range"),
        ({"admin_ports": "x"}, "admin_ports: "),
    ],
)
def test_what_would_leave_the_door_open_ends_with_code_2(
    tmp_path: Path, model: Path, options: dict[str, object], words: str
) -> None:
    assert words in refused(tmp_path, router_options(model, **options))


def test_a_range_without_a_free_port_ends_with_code_2(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(tmp_path, router_options(model, admin_ports=port))
    assert "admin_ports: no port of 127.0.0.1 is free" in said
