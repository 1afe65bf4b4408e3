"""A body that does not come is not waited for without end."""

from __future__ import annotations

import json
import socket
import urllib.parse

import pytest

from tests.router.conftest import RouterProcess


@pytest.mark.slow
@pytest.mark.parametrize("router", [{"body_timeout_s": 0.5}], indirect=True)
def test_a_half_read_body_ends_with_408(router: RouterProcess) -> None:
    at = urllib.parse.urlsplit(router.url)
    assert at.hostname is not None
    assert at.port is not None
    with socket.create_connection((at.hostname, at.port), timeout=20.0) as sock:
        sock.sendall(b'POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt": ')
        answer = b""
        while piece := sock.recv(65536):  # until the router closes the connection
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "0.5 s" in json.loads(body)["error"]["message"]
