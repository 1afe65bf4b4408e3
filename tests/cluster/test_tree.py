"""`baton tree` where nothing, or something else, answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cluster import tree
from cluster.cli import main
from cluster.tree import TreeSource
from common.errors import ConfigError, WorkerLost
from tests.support.members import curve_of, secret_of
from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected


class Answers(BaseHTTPRequestHandler):
    """Says what its path asks for: /CODE/... with a body of its own."""

    def do_GET(self) -> None:
        code = int(self.path.split("/")[1])
        body = b'{"error": {"message": "worker d0 did not report"}}' if code == 503 else b"<html>"
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def stranger() -> Iterator[str]:
    """The URL of an HTTP server that is no router."""
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_url_where_nobody_is_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--url: nothing answers at {url}") as caught:
            TreeSource(url).report([], "tree")
    assert caught.value.key == "--url"
    with pytest.raises(ConfigError, match="--url"):
        TreeSource("not a url").report([], "tree")


def test_a_server_that_is_no_router_is_named(stranger: str) -> None:
    with pytest.raises(ConfigError, match="answers 404: it is not a Baton router"):
        TreeSource(f"{stranger}/404").report(["d0"], "tree")


def test_a_silent_worker_is_exit_code_1(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "--url", f"{stranger}/503", "d0"]) == 1
    assert capsys.readouterr().err == "baton: worker d0 did not report\n"


def test_an_address_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ANSWER_S", 0.2)
    with Mailbox() as silent:
        with pytest.raises(WorkerLost, match=silent.address):
            TreeSource("").report([silent.address], "tree")
        assert [mail.message for mail in silent.wait(1.0)] == [Inspect("tree", 1)]


def test_a_worker_in_a_cluster_with_a_secret_is_asked_with_it() -> None:
    with Mailbox(curve=curve_of()) as worker:

        def answer() -> None:
            for mail in worker.wait(10.0):
                worker.send(mail.sender, Inspected(1, "a tree"))

        thread = threading.Thread(target=answer)
        thread.start()
        assert TreeSource("", secret=secret_of()).report([worker.address], "tree") == {
            worker.address: "a tree"
        }
        thread.join()
