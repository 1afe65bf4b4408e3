"""`baton bench` and `baton chat` against a server of a few lines."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.load.api_client import TimedAnswer
from cluster.load.report import times
from cluster.load.workload import arrivals, random_workload, read_workload
from common.errors import ConfigError


class _Server(ThreadingHTTPServer):
    """Answers with three pieces, as the API does. A prompt with `wrong` is refused, and one with `cut` ends
    too early. With `refused` and `broken` it fails as text-generation-inference does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.now = self.most = 0
        self.refuses_key = False
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.server.refuses_key:
            self._answer(401, {"error": {"message": "no such key"}})
        else:
            self._answer(200, {"data": [{"id": "the-model"}]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            self._stream(body)
        finally:
            with server.lock:
                server.now -= 1

    def _stream(self, body: dict[str, Any]) -> None:
        said = body.get("prompt") or body["messages"][-1]["content"]
        if "wrong" in said:
            self._answer(400, {"error": {"message": "that is wrong"}})
            return
        if "refused" in said:
            self._answer(422, {"error": "that is too long", "error_type": "validation"})
            return
        self.send_response(200)
        self.send_header("X-Request-Id", "id-1")
        self.end_headers()
        chat = "messages" in body
        for text in ("one", " two", " three"):
            piece = {"delta": {"content": text}} if chat else {"text": text}
            self._event({"choices": [piece]})
        if "broken" in said:
            self._event({"error": "no memory", "error_type": "generation"})
            return
        details = {"prompt_tokens_details": {"cached_tokens": 2}}
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, **details}})
        if "cut" not in said:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[_Server]:
    with _Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_bench_counts_what_the_server_tells(server: _Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.bodies.clear()
    arguments = ["--concurrency", "1,4", "--num-prompts", "12", "--output-len", "7", "--json"]
    assert main(["bench", server.url, *arguments]) == 0
    one, four = json.loads(capsys.readouterr().out)
    assert (one["name"], four["name"]) == ("1 at once", "4 at once")
    for run in (one, four):
        assert (run["requests"], run["failures"]) == (12, {})
        assert (run["prompt_tokens"], run["cached_tokens"], run["output_tokens"]) == (60, 24, 36)
        assert run["output_tokens_s"] == pytest.approx(36 / run["seconds"])
        shares = run["percentiles"]
        assert set(shares) == {"ttft", "itl", "tpot", "e2e"}
        assert all(len(values) == 3 and values == sorted(values) for values in shares.values())
        assert shares["ttft"][0] <= shares["e2e"][0]
    assert server.most <= 4
    sent = server.bodies[2:]  # two are not counted
    assert len({body["prompt"] for body in sent}) == 24, "no prompt twice"
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in sent} == {
        ("the-model", 7, True)
    }


def test_bench_prints_a_table_and_draws(
    server: _Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curves.png"
    assert (
        main(["bench", server.url, "--request-rate", "500", "--num-prompts", "5", "--png", str(picture)]) == 0
    )
    said = capsys.readouterr().out
    assert "500 per second" in said
    assert "time to first token, p50" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("wrong", "400: that is wrong"),
        ("cut", "the stream has no end"),
        ("refused", "422: that is too long"),
        ("broken", "no memory"),
    ],
)
def test_bench_tells_failures(
    server: _Server, tmp_path: Path, prompt: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(f'{{"prompt": "{prompt}"}}\na plain line\n')
    flags = ["--prompts", str(tmp_path / "prompts"), "--num-prompts", "4", "--concurrency", "2"]
    assert main(["bench", server.url, *flags]) == 1
    assert capsys.readouterr().err == f"baton: 2 at once: 2 x {why}\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency", "0"], "--concurrency: '0' is not a list of positive numbers"),
        (["--concurrency", "1.5"], "--concurrency: 1.5 are not whole numbers"),
        (["--request-rate", "inf"], "--request-rate: 'inf'"),
        (["--num-prompts", "0"], "--num-prompts: 0 is too small"),
        (["--prefix-len", "-3"], "--prefix-len: -3 is too small"),
        (["--input-len", "4", "--prefix-len", "5"], "--prefix-len: 5 is longer"),
        (["--prompts", "/nowhere"], "--prompts: cannot read /nowhere"),
    ],
)
def test_bench_refuses(
    server: _Server, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", server.url, *flags])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"baton: {words}")


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_no_server_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "http://127.0.0.1:1"])
    assert ended.value.code == 2
    assert "no server with OpenAI's API answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_wrong_key_is_told_with_what_sets_it(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "refuses_key", True)
    with pytest.raises(SystemExit):
        main(["bench", server.url])
    assert (
        capsys.readouterr().err
        == f"baton: url: {server.url}: no such key; set OPENAI_API_KEY to a key of it\n"
    )


def test_chat_answers_what_comes_from_a_pipe(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.bodies.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nyou"))
    assert main(["chat", server.url, "--system", "Be short.", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "one two three\n"
    (body,) = server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hello\nyou"},
    ]
    assert body["max_tokens"] == 9
    monkeypatch.setattr("sys.stdin", io.StringIO("wrong"))
    assert main(["chat", server.url]) == 1
    assert "that is wrong" in capsys.readouterr().err


def test_chat_at_a_terminal_remembers_until_a_new_one(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.bodies.clear()
    lines = iter(["first", "wrong", "", "second", "/new", "third"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    def typed(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", server.url]) == 0
    asked = [[one["content"] for one in body["messages"]] for body in server.bodies]
    assert asked == [
        ["first"],
        ["first", "one two three", "wrong"],
        ["first", "one two three", "second"],
        ["third"],
    ]
    assert capsys.readouterr().out.startswith("one two three\n")


def test_times_of_an_answer() -> None:
    answer = TimedAnswer(sent_at=10.0, piece_times=[11.0, 11.5, 13.0], ended_at=13.5, output_tokens=5)
    assert times(answer) == {"ttft": [1.0], "itl": [0.5, 1.5], "tpot": [0.5], "e2e": [3.5]}
    assert times(TimedAnswer(sent_at=1.0, ended_at=2.0)) == {"ttft": [], "itl": [], "tpot": [], "e2e": [1.0]}


def test_prompts_share_their_prefix_and_nothing_more() -> None:
    prompts = [prompt.split() for prompt in random_workload(50, 40, 10, 1, seed=3).prompts]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt[10:]) for prompt in prompts}) == 50


def test_arrivals_have_their_mean_rate() -> None:
    times = list(arrivals(5000, 20.0, seed=1))
    assert times == sorted(times)
    assert 5000 / times[-1] == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize("text", ["", '{"text": "a"}', '{"prompt": 5}', "{"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "prompts").write_text(text)
    with pytest.raises(ConfigError, match="prompts"):
        read_workload(tmp_path / "prompts", 1, 1)
