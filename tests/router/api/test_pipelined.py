"""A client sends several requests at once on one connection."""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from wire.messages.rooms import Abort, Decode
from wire.records import Role

BODY = b'{"prompt": "Hello", "max_tokens": 400}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path, model: Path) -> Iterator[tuple[RouterProcess, FakeWorker]]:
    """A request takes 40 s."""
    router = start_router(tmp_path, model)
    worker = FakeWorker(Role.DECODE, router.mailbox, max_context=512, step_s=0.1)
    router.wait_for_workers(1)
    yield router, worker
    worker.close()
    assert router.stop() == 0


def test_what_breaks_a_connection_ends_the_request_that_is_being_answered(
    service: tuple[RouterProcess, FakeWorker],
) -> None:
    router, worker = service
    at = urllib.parse.urlsplit(router.url)
    with socket.create_connection((at.hostname, at.port), timeout=10.0) as client:
        client.sendall(REQUEST)
        wait_until(lambda: worker.count(Decode) == 1)
        client.sendall(REQUEST + b"no HTTP\r\n\r\n")
        with suppress(ConnectionResetError):
            assert client.recv(65536) == b""
    wait_until(lambda: worker.count(Abort) == 1)
    assert worker.count(Decode) == 1, "the second never began"
    assert worker.open_rooms() == 0
