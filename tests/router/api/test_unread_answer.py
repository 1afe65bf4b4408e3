"""An answer that its client does not read is not kept without end."""

from __future__ import annotations

import json
import re
import socket
import urllib.parse
from typing import Any

import pytest

from tests.router.conftest import RouterProcess, wait_until
from tests.support.fake_worker import FakeWorker
from wire.messages.rooms import Abort, Decode
from wire.records import Role

pytestmark = pytest.mark.slow
LENGTH = 200_000  # tokens: minutes


def rows(router: RouterProcess, what: str) -> list[dict[str, Any]]:
    found = router.admin.get("/debug/leases").json()["leases"]
    return [row for row in found if row["what"] == what]


def first_row(router: RouterProcess, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """As it was when it was first seen: an answer is read again when the kernel takes some more of it."""
    seen: list[dict[str, Any]] = []

    def listed() -> bool:
        seen.extend(rows(router, what))
        return bool(seen)

    wait_until(listed, timeout_s)
    return seen[0]


def swept(router: RouterProcess, kind: str) -> float:
    line = rf'^baton_router_swept_holds_total\{{kind="{kind}"\}} (\S+)$'
    found = re.search(line, router.admin.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def connect(router: RouterProcess) -> socket.socket:
    at = urllib.parse.urlsplit(router.url)
    assert at.hostname is not None
    assert at.port is not None
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20.0)
    sock.connect((at.hostname, at.port))
    return sock


@pytest.mark.parametrize("router", [{"unread_timeout_s": 3.0}], indirect=True)
def test_a_client_that_never_reads_is_left_and_its_rooms_are_aborted(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    """At most 0.25 MB come in a second. In 3 s that is less than may wait, 1 MiB. The kernel takes some 3 MB
    before any waits; that must not take 30 s, after which it gives the connection up."""
    decode = FakeWorker(Role.DECODE, router.mailbox, max_context=LENGTH + 100, step_s=0.01)
    workers.append(decode)
    router.wait_for_workers(1)
    given = {"model": "tiny", "prompt": [7], "max_tokens": LENGTH, "n": 16, "stream": True}
    body = json.dumps(given).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: deaf\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with connect(router) as sock:
        sock.sendall(head.encode() + body)
        row = first_row(router, "unread answer", 60.0)
        assert row["owner"] == "client of deaf"
        assert row["age_s"] + row["deadline_s"] == pytest.approx(3.0)
        wait_until(lambda: swept(router, "unread answer") == 1, 60.0)  # the kernel may take more meanwhile
        rooms = {message.room for message in list(decode.seen) if isinstance(message, Decode)}
        assert len(rooms) == 16
        wait_until(lambda: rooms == {m.room for m in list(decode.seen) if isinstance(m, Abort)}, 20.0)
        assert rows(router, "unread answer") == []
        wait_until(lambda: router.admin.get("/debug/rooms").json()["rooms"] == [])


@pytest.mark.parametrize("router", [{"unread_timeout_s": 0.5}], indirect=True)
def test_a_slow_stream_that_is_read_goes_on(router: RouterProcess, workers: list[FakeWorker]) -> None:
    workers.append(FakeWorker(Role.DECODE, router.mailbox, step_s=0.8))
    router.wait_for_workers(1)
    answer = router.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": [7], "max_tokens": 4, "stream": True}
    )
    assert answer.text.endswith("data: [DONE]\n\n")
    assert swept(router, "unread answer") == 0


def test_a_half_read_body_is_listed(router: RouterProcess) -> None:
    with connect(router) as sock:
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nx-request-id: half\r\ncontent-length: 100\r\n\r\n{"
        sock.sendall(head)
        row = first_row(router, "half-read body")
        assert row["owner"] == "client of half"
        assert row["age_s"] + row["deadline_s"] == pytest.approx(300.0)
    wait_until(lambda: rows(router, "half-read body") == [])
