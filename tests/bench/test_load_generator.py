"""bench.router's load generator checks every answer; its workers give right ones, one token at a time."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.compiled import compiled
from bench.router_rig import (
    ROOT,
    Endpoint,
    LoadGenerator,
    bare_router,
    tokenize_p50_us,
    worker_own_ms,
    workers,
    write_prompts,
)
from common.compile import BuildError

pytestmark = pytest.mark.slow
DEMO_MODEL = ROOT / "deploy" / "demo_model"

EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def server(
    pieces: list[bytes], status: int = 200, closes: bool = False
) -> Iterator[tuple[Endpoint, list[Any]]]:
    """Answers every request with these chunks, and closes the connection after it if `closes`.

    Yields where it listens, and a list of the requests' bodies.
    """
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            if closes:
                self.send_header("Connection", "close")  # and closes it
            self.end_headers()
            for piece in [*pieces, b""]:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Endpoint("127.0.0.1", listening.server_address[1], "m"), bodies
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def load(tmp_path: Path) -> LoadGenerator:
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(json.dumps(f'prompt "{number}"\n') + "\n" for number in range(1000)))
    return LoadGenerator(prompts, chat=False)


def test_right_answers_are_counted_in_whatever_pieces_they_come(load: LoadGenerator) -> None:
    stream = EVENT * 3 + DONE
    with server([stream[i : i + 7] for i in range(0, len(stream), 7)]) as (at, bodies):
        shot = load.fire(at, 2, 3, 0.3)
    assert shot.rps > 0
    assert 0 < shot.first_ms < 300
    assert shot.router_us is None
    prompts = [body.pop("prompt") for body in bodies]
    assert sorted(prompts) == sorted(f'prompt "{number}"\n' for number in range(len(bodies)))
    assert bodies[0] == {"model": "m", "max_tokens": 3, "ignore_eos": True, "stream": True}


def test_a_server_may_close_a_connection_when_it_says_so(load: LoadGenerator) -> None:
    with server([EVENT, DONE], closes=True) as (at, bodies):
        assert load.fire(at, 2, 1, 0.3).rps > 0
    assert len(bodies) > 2


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        ([EVENT, EVENT, DONE], 200, "had 2 events, not 3"),
        ([EVENT, EVENT, EVENT], 200, r"ended without \[DONE\]"),
        ([EVENT, DONE, EVENT, EVENT], 200, r"ended without \[DONE\]"),
        ([b'{"error": "no"}'], 503, "status is not 200"),
    ],
)
def test_wrong_answers_end_the_measurement(
    load: LoadGenerator, capfd: pytest.CaptureFixture[str], pieces: list[bytes], status: int, words: str
) -> None:
    with server(pieces, status) as (at, _), pytest.raises(subprocess.CalledProcessError):
        load.fire(at, 1, 3, 0.2)
    assert words.replace("\\", "") in capfd.readouterr().err


@pytest.fixture
def compiler() -> None:
    try:
        compiled("fake_worker", "zmq")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("tokens", "secured"), [(1, False), (16, True)])
def test_workers_of_the_bench_answer_through_a_router(tmp_path: Path, tokens: int, secured: bool) -> None:
    """One event per token, over prefill and decode, as the load generator checks; nothing is left open."""
    prompts = tmp_path / "prompts"
    write_prompts(prompts, DEMO_MODEL, 20)
    with bare_router(DEMO_MODEL, "m", tmp_path, secured=secured) as (at, directory), workers(at, directory):
        shot = LoadGenerator(prompts, chat=False).fire(at, 4, tokens, 0.3)
        own_ms = worker_own_ms(at)
        metrics = httpx.get(at.admin + "/metrics").text
    assert tokenize_p50_us(DEMO_MODEL, prompts) > 0
    assert shot.rps > 0
    assert own_ms is not None
    assert 0 < own_ms < shot.first_ms
    assert "baton_router_restarts_total 0.0" in metrics
    assert "baton_router_rooms 0.0" in metrics
