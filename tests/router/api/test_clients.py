"""What real clients send beside fields: packed bodies, other types, pages in browsers, long prompts."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.text.tokenization import Tokenization
from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.records import Role

BODY = {"prompt": "Hello", "max_tokens": 2}
CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RouterProcess]:
    """With a worker for both phases, and one site whose pages may ask."""
    options = {"cors_origins": [PAGE], "max_body_bytes": 1 << 20}
    router = start_router(tmp_path_factory.mktemp("clients"), model, **options)
    d = FakeWorker(Role.DECODE, router.mailbox, max_context=512, step_s=0.001)
    router.wait_for_workers(1)
    yield router
    d.close()
    assert router.stop() == 0


def ask(router: RouterProcess, content: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return router.http.post("/v1/completions", content=content, headers=named)


def refusal(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


def test_a_packed_body(router: RouterProcess) -> None:
    plain = json.dumps(BODY).encode()
    for name in ("gzip", "GZIP", "x-gzip", "identity"):
        body = plain if name == "identity" else gzip.compress(plain)
        assert ask(router, body, content_encoding=name).status_code == 200
    assert "not gzip" in refusal(ask(router, plain, content_encoding="gzip"), 400)
    assert "not one whole" in refusal(ask(router, gzip.compress(plain)[:-9], content_encoding="gzip"), 400)
    assert "gzip, or none" in refusal(ask(router, zlib.compress(plain), content_encoding="deflate"), 415)


def test_what_a_packed_body_unpacks_to_is_bounded(router: RouterProcess) -> None:
    bomb = gzip.compress(b" " * (1 << 30))
    assert len(bomb) < 1 << 20 + 1
    began = time.monotonic()
    assert "1048576 bytes" in refusal(ask(router, bomb[: 1 << 20], content_encoding="gzip"), 413)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 200),  # curl's and urllib's, where nobody says one
        ("multipart/form-data; boundary=x", 415),
        ("image/png", 415),
    ],
)
def test_the_type_of_a_body(router: RouterProcess, kind: str, status: int) -> None:
    answer = ask(router, json.dumps(BODY).encode(), content_type=kind)
    if status == 415:
        assert "application/json is needed" in refusal(answer, 415)
    assert answer.status_code == status


def test_pages_of_sites_that_were_named_may_read_answers(router: RouterProcess) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = router.http.options("/v1/completions", headers={"Origin": PAGE, **asked})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for body, status in ((BODY, 200), ({**BODY, "stream": True}, 200), ({}, 400)):
        answer = router.http.post("/v1/completions", json=body, headers={"Origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert answer.headers["vary"] == "origin"
    other = router.http.post("/v1/completions", json=BODY, headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in router.http.post("/v1/completions", json=BODY).headers


def test_a_websocket_is_refused_with_a_reason(router: RouterProcess) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        received = b""
        while b"}}" not in received:
            received += client.recv(65_536)
    answer = received.decode()
    assert re.match(r"HTTP/1.1 4\d\d ", answer)
    assert "no websockets" in answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "a\\ud800"}'),
        ("/v1/completions", '{"prompt": "a", "stop": "\\ud800"}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\udc00"}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "\\udc00", "content": "a"}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", "\\ud800": 1}]}'),
        ("/generate", '{"text": "\\ud800x"}'),
        ("/tokenize", '{"prompt": "\\udfff"}'),
        ("/v1/completions", '{"prompt": "a", "user": "\\ud800"}'),
        ("/v1/completions", '{"\\ud800": 1}'),
    ],
)
def test_half_a_character_is_a_bad_request(router: RouterProcess, path: str, body: str) -> None:
    assert "surrogate" in refusal(router.http.post(path, content=body.encode()), 400)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    router: RouterProcess, model: Path
) -> None:
    longest = Tokenization(model).longest_token_bytes
    text = "x y " * (512 * longest // 4 + 1000)
    for path, asked in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/generate", {"text": text}),
    ):
        answer = router.http.post(path, json=asked)
        assert re.search(r"needs \d+ tokens of context", refusal(answer, 400))
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    cut = {"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 2}
    assert router.http.post("/v1/completions", json=cut).status_code == 200
    assert router.http.post("/tokenize", json={"prompt": text}).json()["count"] > 512


def test_models_by_name_and_what_probes_ask(router: RouterProcess) -> None:
    assert router.openai().models.retrieve("tiny").id == "tiny"
    assert "'org/other' does not exist" in refusal(router.http.get("/v1/models/org/other"), 404)
    assert "does not take DELETE" in refusal(router.http.delete("/v1/models/tiny"), 405)
    assert router.http.get("/ping").status_code == 200
    assert router.http.get("/health_generate").json() == {"status": "ok"}
    info = router.http.get("/get_model_info").json()
    assert (info["model_path"], info["is_generation"], info["max_model_len"]) == ("tiny", True, 512)


def test_each_request_is_counted_with_a_status(router: RouterProcess) -> None:
    def counted() -> dict[str, float]:
        text = router.admin.get("/metrics").text
        found = re.findall(r'baton_router_requests_total\{status="(\d+)"\} ([\d.]+)', text)
        return {status: float(value) for status, value in found}

    before = counted().get("499", 0)
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    wait_until(lambda: counted().get("499", 0) == before + 1)  # left in the middle of the body
    long = json.dumps({"prompt": "Hello", "max_tokens": 400}).encode()
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(long)}\r\n\r\n"
        client.sendall(head.encode() + long)
    wait_until(lambda: counted().get("499", 0) == before + 2)  # left before the answer
    assert "0" not in counted()
