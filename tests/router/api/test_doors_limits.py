"""What a connection may send, and how long it may take. A crowd of strangers keeps nobody waiting."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.connections import possible_connections
from tests.router.conftest import RouterProcess, start_router

HEAD = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
LIMITS = {"max_body_bytes": 4096, "max_header_bytes": 2048, "header_timeout_s": 0.5, "body_timeout_s": 0.5}
CROWD = 1000
STRANGERS_STAY_S = 60.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RouterProcess]:
    """A router with narrow bounds, and without workers."""
    router = start_router(tmp_path_factory.mktemp("limits"), model, **LIMITS)
    yield router
    assert router.stop() == 0


def connect(router: RouterProcess) -> socket.socket:
    at = urllib.parse.urlsplit(router.url)
    assert at.hostname is not None
    assert at.port is not None
    return socket.create_connection((at.hostname, at.port), timeout=10.0)


def read_to_end(sock: socket.socket) -> bytes:
    answer = b""
    while piece := sock.recv(65536):
        answer += piece
    return answer


def read_answer(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of the next answer."""
    with http.client.HTTPResponse(sock) as answer:
        answer.begin()
        return answer.status, json.loads(answer.read())


def read_error(sock: socket.socket) -> tuple[int, str]:
    """Status and message of the next answer."""
    status, body = read_answer(sock)
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


def refused(router: RouterProcess, sent: bytes) -> tuple[int, str]:
    """The answer to bytes after which the router closes the connection."""
    with connect(router) as sock:
        sock.sendall(sent)
        found = read_error(sock)
        assert read_to_end(sock) == b""
    return found


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"a: " + b"x" * 3000 + b"\r\n\r\n",
        HEAD + b"".join(b"h%d: %s\r\n" % (at, b"x" * 100) for at in range(30)) + b"\r\n",
        b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["one long header", "many headers", "a long path"],
)
def test_a_large_head_is_a_431(tight: RouterProcess, sent: bytes) -> None:
    status, message = refused(tight, sent)
    assert (status, "at most 2048 bytes" in message) == (431, True)


def test_a_header_without_an_end_is_a_431(tight: RouterProcess) -> None:
    with connect(tight) as sock:
        sock.sendall(HEAD + b"a: ")
        for _ in range(4):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(b"x" * 1000)
            time.sleep(0.02)  # in pieces of their own
        assert read_error(sock)[0] == 431


def test_an_announced_body_that_is_too_large_is_not_waited_for(tight: RouterProcess) -> None:
    with connect(tight) as sock:
        sock.sendall(HEAD + b"content-length: 4097\r\n\r\n")
        assert read_error(sock) == (413, "the body has more than 4096 bytes")


def test_a_body_of_unknown_length_is_counted(tight: RouterProcess) -> None:
    with connect(tight) as sock:
        sock.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + 3 * (b"7d0\r\n" + b" " * 2000 + b"\r\n"))
        assert read_error(sock)[0] == 413


def test_the_longest_body_is_taken(tight: RouterProcess) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    answer = tight.http.post("/tokenize", content=body + b" " * (4096 - len(body)))
    assert answer.status_code == 200


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"a: x", b"P"], ids=["no end", "half a header", "one byte"])
def test_a_slow_head_is_a_408(tight: RouterProcess, sent: bytes) -> None:
    status, message = refused(tight, sent)
    assert (status, "0.5 s" in message) == (408, True)


def test_a_client_that_says_nothing_is_left(tight: RouterProcess) -> None:
    with connect(tight) as sock:
        assert read_to_end(sock) == b""


def test_a_kept_connection_is_not_kept_by_empty_lines(tight: RouterProcess) -> None:
    """The parser skips them in front of a request."""
    with connect(tight) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answer(sock)[0] == 200
        sock.sendall(b"\r\n")
        assert read_to_end(sock) == b""


def test_a_body_that_nobody_reads_has_an_end(tight: RouterProcess) -> None:
    with connect(tight) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\nx")
        assert read_answer(sock)[0] == 404
        sock.sendall(b"x")
        assert read_to_end(sock) == b""


def test_what_is_not_http_is_told_so_in_openais_form(tight: RouterProcess) -> None:
    assert refused(tight, b"\x16\x03\x01\x02\x00")[0] == 400


def test_the_next_request_of_a_connection_has_its_own_time(tight: RouterProcess) -> None:
    with connect(tight) as sock:
        for _ in range(2):
            time.sleep(0.35)  # together longer than the bound of each
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_answer(sock)[0] == 200
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: ")
        assert read_error(sock)[0] == 408


@pytest.mark.parametrize("router", [{"max_connections": 3}], indirect=True)
def test_one_connection_too_many_is_a_503(router: RouterProcess) -> None:
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(connect(router)) for _ in range(3)]
        with connect(router) as sock:
            answer = read_to_end(sock)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_answer(sock)[0] == 200


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 1_000_000, 8192 + 16_256, 8192),
        (1_000_000, 1_000_000, None, 8192),
        (1024, resource.RLIM_INFINITY, 8192 + 16_256, 8192),
        (1024, 20_000, 20_000, 8192),
        (1024, 4096, 4096, 1920),
        (1024, 1024, 1024, 384),
        (257, 257, 257, 1),
    ],
)
def test_clients_leave_descriptors_to_workers(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, connections: int
) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert possible_connections(8192) == connections
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_limit_without_room_for_clients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ConfigError, match="256 open files are too few"):
        possible_connections(8192)


@pytest.mark.parametrize(
    "router", [{"header_timeout_s": STRANGERS_STAY_S, "body_timeout_s": STRANGERS_STAY_S}], indirect=True
)
@pytest.mark.parametrize(
    "said",
    [b"", HEAD + b"a: ", HEAD + b"content-length: 100\r\n\r\n{"],
    ids=["idle", "half a head", "half a body"],
)
def test_a_thousand_strangers_keep_nobody_waiting(router: RouterProcess, said: bytes) -> None:
    """Nobody waits until they are sent away."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, CROWD + 500)), hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(CROWD):
            held.enter_context(connect(router)).sendall(said)
        began = time.monotonic()
        for _ in range(5):
            assert router.http.post("/tokenize", json={"prompt": "Hello"}).status_code == 200
        assert time.monotonic() - began < STRANGERS_STAY_S / 2
