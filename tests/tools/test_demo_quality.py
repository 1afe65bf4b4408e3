"""The check against a small server that answers from the frozen expectations, rightly or wrongly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tools import demo_quality
from tools.demo_quality import QUALITY, CheckError, load_expectations

Answer = Callable[[str], str]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """An OpenAI-shaped server whose chats are answered by `answer(question)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({"data": [{"id": "demo"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "demo"
            assert body["temperature"] == 0
            text = answer(body["messages"][0]["content"])
            self._reply({"choices": [{"message": {"role": "assistant", "content": text}}]})

        def _reply(self, body: Any) -> None:
            payload = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def quality_file(folder: Path, held_out: tuple[str, ...]) -> Path:
    """Expectations for 60 functions f00 to f59."""
    path = folder / "quality.json"
    frozen = {
        "training_phrasings": ["What does {name} do?"],
        "held_out_phrasings": held_out,
        "functions": {f"f{number:02}": f"Does thing {number:02}." for number in range(60)},
    }
    path.write_text(json.dumps(frozen))
    return path


HELD_OUT = ("Sum up {name}.", "And {name}, then?", "Say more of {name}!")


def right(question: str) -> str:
    found = re.search(r"f(\d\d)", question)
    assert found
    return f"Does thing {found[1]}. More follows."


def check(folder: Path, answer: Answer, held_out: tuple[str, ...] = HELD_OUT) -> int:
    with serving(answer) as url:
        return demo_quality.main(["--url", url, "--quality", str(quality_file(folder, held_out))])


def test_right_answers_pass_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, right) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"50 of 50: {phrasing}" for phrasing in HELD_OUT]
    assert lines[3].startswith("demo quality ok: 50 of 50 in the phrasing drawn for each")


def test_one_phrasing_that_fails_is_enough_to_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_wrong(question: str) -> str:
        return "I do not know." if question.startswith("And") else right(question)

    assert check(tmp_path, one_wrong) == 1
    output = capsys.readouterr().out
    assert "0 of 50: And {name}, then?" in output
    assert "50 of 50: Sum up {name}." in output
    assert "have: I do not know." in output


def test_a_phrasing_that_training_knows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leak = ("Sum up {name}.", "what does `{name}` do", "Say more of {name}!")
    assert check(tmp_path, right, leak) == 2
    assert "occurs in training" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = quality_file(tmp_path, HELD_OUT)
    with serving(right) as url:
        pass
    assert demo_quality.main(["--url", url, "--quality", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_expectations_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"quality\.json"):
        load_expectations(tmp_path / "quality.json")


def test_the_shipped_expectations_are_sound() -> None:
    shipped = load_expectations(QUALITY)
    assert len(shipped.sentences) >= 600
    assert len(shipped.training) >= 6
    assert len(shipped.held_out) == 3
