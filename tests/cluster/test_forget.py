"""`baton forget`: what it asks for, and what it tells."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from cluster.cli import main

REPORT: dict[str, Any] = {
    "nodes": 3,
    "removed": {
        "device": {"pages": 1200, "bytes": 2_000_000_000},
        "storage": {"pages": 7, "bytes": 10_000_000},
    },
    "locked_pages": 0,
    "unfinished": [],
    "problem": "",
}


class ForgettingRouter(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []
    answer: ClassVar[object] = {}

    def do_POST(self) -> None:
        self.asked.append(self.path)
        body = json.dumps(self.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def router() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), ForgettingRouter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_says_what_each_worker_removed_and_who_is_silent(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ForgettingRouter.answer = {"workers": {"d1": REPORT}, "silent": [], "told": True}
    assert main(["forget", "a b/c", "--url", router]) == 0
    assert capsys.readouterr().out == "d1: device 1,200 pages, 2 GB; storage 7 blobs, 0.01 GB\n"
    assert ForgettingRouter.asked[-1] == "/admin/tenants/a%20b%2Fc/forget"
    partly = REPORT | {
        "locked_pages": 4,
        "unfinished": ["device"],
        "removed": {},
        "problem": "storage: broken",
    }
    ForgettingRouter.answer = {"workers": {"d1": partly}, "silent": ["p1"], "told": False}
    assert main(["forget", "a", "--url", router]) == 1
    told = capsys.readouterr()
    assert told.out == "d1: 4 pages are in use and go when they are not\n"
    assert "d1: storage: broken" in told.err
    assert "p1 did not answer in time" in told.err
    assert "the directory did not answer" in told.err
    assert main(["forget", "a", "--url", router, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["silent"] == ["p1"]
