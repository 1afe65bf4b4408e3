"""`baton tree` where nothing, or something else, answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cluster import tree
from cluster.cli import main
from cluster.tree import TreeSource
from common.errors import ConfigError, WorkerLost
from tests.router.conftest import start_router
from tests.support.members import curve_of, secret_of
from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected

ROOT = Path(__file__).parents[2]


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


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a router's API."""
    running = start_router(tmp_path_factory.mktemp("api"), ROOT / "deploy" / "demo_model")
    yield running.url
    assert running.stop() == 0


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
    with pytest.raises(ConfigError, match="answers 404: it is not the admin listener of a Baton router"):
        TreeSource(f"{stranger}/404").report(["d0"], "tree")


@pytest.mark.parametrize("command", [["tree"], ["top", "--once"], ["cache"], ["trace", "r"]])
def test_a_server_that_answers_everything_is_no_router(
    command: list[str], stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--url", f"{stranger}/200"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"baton: --url: {stranger}/200 answers with a page of something"
    )


@pytest.mark.parametrize("command", [["tree", "d0"], ["top", "--once"], ["forget", "t"]])
def test_the_address_of_the_api_is_not_that_of_the_admin_listener(
    command: list[str], api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--url", api])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"baton: --url: {api} has no /")


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
