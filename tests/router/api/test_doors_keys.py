"""API keys: who may ask, on whose behalf, and how keys change while requests run."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.keys import Keys, plain_keys
from tests.router.api.test_doors_admin import bearer
from tests.router.api.test_doors_limits import connect, read_error
from tests.router.conftest import RouterProcess, refused, router_options, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.messages.rooms import Decode
from wire.records import Role

pytestmark = pytest.mark.slow
GOLD = "the key of the tenant gold"
HASHED = "a key of which the file has only the digest"
GATEWAY = "the key of the gateway in front"
OTHER = "another key that is of nobody at first"
KEYS = [
    {"key": GOLD, "tenant": "gold", "max_priority": 2},
    {"key": "sha256:" + hashlib.sha256(HASHED.encode()).hexdigest()},
    {"key": GATEWAY, "gateway": True, "max_priority": 9},
]
TENANT = "X-Baton-Tenant"
BODY = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
CLOSED = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
    ("POST", "/generate"), ("POST", "/tokenize"), ("POST", "/detokenize"),
]  # fmt: skip
Service = tuple[RouterProcess, FakeWorker]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """A router with keys, and a decode worker."""
    directory = tmp_path_factory.mktemp("keys")
    (directory / "keys.yaml").write_text(json.dumps(KEYS))  # a list in YAML, too
    options = {"api_keys_file": str(directory / "keys.yaml"), "trusted_tenant_header": TENANT}
    router = start_router(directory, model, **options)
    worker = FakeWorker(Role.DECODE, router.mailbox)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_the_api_wants_a_key(service: Service, method: str, path: str) -> None:
    router, _ = service
    for headers in ({}, bearer(OTHER), {"Authorization": GOLD}, bearer("x"), bearer("\xe4" * 20)):
        given = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = router.http.request(method, path, headers=given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert router.http.request(method, path, headers=bearer(GOLD)).status_code in (200, 400)


def test_anybody_may_ask_whether_the_router_lives(service: Service) -> None:
    router, _ = service
    assert [router.http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200] * 3


def test_a_body_is_not_read_before_its_key(service: Service) -> None:
    router, _ = service
    with connect(router) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert read_error(sock)[0] == 401


def decoded(worker: FakeWorker) -> Any:
    """The one request that the worker was asked to decode. A message that is answered late is repeated."""
    (sent,) = {one.room: one.request for one in list(worker.seen) if isinstance(one, Decode)}.values()
    return sent


@pytest.mark.parametrize(
    ("key", "header", "priority", "served"),
    [
        (GOLD, None, 7, ("gold", 2)),
        (GOLD, "silver", -1, ("gold", -1)),
        (HASHED, "silver", 7, ("", 0)),
        (GATEWAY, "silver", 7, ("silver", 7)),
        (GATEWAY, None, 11, ("", 9)),
    ],
)
def test_the_key_decides_tenant_and_priority(
    service: Service, key: str, header: str | None, priority: int, served: tuple[str, int]
) -> None:
    router, worker = service
    named = {TENANT: header} if header is not None else {}
    body = {**BODY, "priority": priority, "user": "somebody"}
    worker.seen.clear()
    answer = router.http.post("/generate", json=body, headers={**bearer(key), **named})
    assert answer.status_code == 200
    sent = decoded(worker)
    assert (sent.tenant, sent.priority) == served


@pytest.mark.parametrize(
    ("options", "tenant"), [({}, ""), ({"trusted_tenant_header": "X-My-Tenant"}, "silver")]
)
def test_without_keys_only_a_trusted_header_names_a_tenant(
    tmp_path: Path, model: Path, workers: list[FakeWorker], options: dict[str, Any], tenant: str
) -> None:
    router = start_router(tmp_path, model, **options)
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    router.wait_for_workers(1)
    headers = {TENANT: "gold", "X-My-Tenant": "silver"}
    assert router.http.post("/generate", json={**BODY, "user": "me"}, headers=headers).status_code == 200
    sent = decoded(workers[0])
    assert sent.tenant == tenant
    assert router.stop() == 0


def test_keys_come_from_the_environment_too(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEYS", f"{GOLD},{OTHER}")
    router = start_router(tmp_path, model)
    found = [router.http.get("/v1/models", headers=bearer(key)).status_code for key in (GOLD, OTHER, HASHED)]
    assert found == [200, 200, 401]
    assert router.stop() == 0


def test_keys_change_under_load(tmp_path: Path, model: Path, workers: list[FakeWorker]) -> None:
    """Whoever has a key that holds is never refused, and a key that was taken away does not hold for long."""
    file = tmp_path / "keys"

    def write(*keys: str) -> None:
        """At once, as Kubernetes does: a reader sees all of the old file or all of the new one."""
        new = tmp_path / "new"
        new.write_text("".join(json.dumps({"key": key}) + "\n" for key in keys))
        new.replace(file)

    write(GOLD)
    router = start_router(tmp_path, model, api_keys_file=str(file))
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    router.wait_for_workers(1)
    key, ended, statuses = GOLD, threading.Event(), list[int]()

    def ask() -> None:
        with httpx.Client(base_url=router.url, timeout=20.0) as client:
            while not ended.is_set():
                statuses.append(client.post("/generate", json=BODY, headers=bearer(key)).status_code)

    def status(tried: str) -> int:
        return router.http.get("/v1/models", headers=bearer(tried)).status_code

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            write(GOLD, OTHER)
            wait_until(lambda: status(OTHER) == 200)
            key = OTHER
            time.sleep(0.2)  # requests with the old key are answered
            write(OTHER)
            wait_until(lambda: status(GOLD) == 401)
            file.write_text("{")
            wait_until(lambda: broken_files(router) == 1.0)
            assert (status(OTHER), status(GOLD)) == (200, 401)
        finally:
            ended.set()
        for one in asking:
            one.result(20.0)
    assert set(statuses) == {200}
    assert router.stop() == 0


def broken_files(router: RouterProcess) -> float:
    router.http.get("/v1/models", headers=bearer(OTHER))  # which looks at the file
    found = re.search(r"^baton_router_broken_key_files_total (\S+)", router.admin.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no key in it"),
        ("- key: secret", "at least 16 characters"),
        ("- {key: secret-secret-secret, tenants: a}", "entry 1: tenants: Extra inputs are not permitted"),
        ("- {key: secret-secret-secret, gateway: true, tenant: a}", "a gateway's key has no tenant"),
        ("secret: [", "neither YAML nor lines of JSON"),
        ("- key: sha256:secret", "64 hexadecimal digits"),
    ],
)
def test_keys_that_cannot_work_end_with_code_2_and_are_not_quoted(
    tmp_path: Path, model: Path, text: str, words: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    said = refused(tmp_path, router_options(model, api_keys_file=str(file)))
    assert words in said
    assert "secret" not in said.removeprefix("router: api_keys_file: ")


def test_a_key_may_end_with_any_letter(tmp_path: Path) -> None:
    """The last byte of some is what Latin-1 calls a space."""
    key, path = "d\u00e9j\u00e0-vu-0123456789-d\u00e9j\u00e0", tmp_path / "keys"
    path.write_text(f"{key}\n")
    keys = Keys("api_keys_file", path, "", plain_keys)
    header = f"Bearer {key} ".encode().decode("latin-1")
    assert keys.find(header) is not None
    assert keys.find(None, header.removeprefix("Bearer ")) is not None
    assert keys.find(header[:-2]) is None
