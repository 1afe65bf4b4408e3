"""The file with a line for each request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.errors import ConfigError, Overloaded
from router.request_lines import RequestLine, RequestLines, error_name, generated
from router.trace import RequestTrace
from tests.router.streams.test_generation import Request, gained
from wire.request import FinishReason


def line(number: int) -> RequestLine:
    return RequestLine("2026-11-23T00:00:00.000+00:00", f"r{number}", "POST", "/v1/completions", 200, 0.5)


def test_lines_go_on_in_a_new_file_when_the_old_one_is_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines, others = (RequestLines(path, with_prompts=False) for _ in range(2))  # two processes of one router
    lines.write(line(0))
    others.write(line(1))
    path.rename(tmp_path / "old.jsonl")
    lines.write(line(2))
    for one in (lines, others):
        one.close()
    old = (tmp_path / "old.jsonl").read_text().splitlines()
    assert [json.loads(one)["request_id"] for one in old] == ["r0", "r1"]
    assert json.loads(path.read_text()) == {
        "time": "2026-11-23T00:00:00.000+00:00", "request_id": "r2", "method": "POST",
        "path": "/v1/completions", "status": 200, "seconds": 0.5,
    }  # fmt: skip


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="request_log: cannot write"):
        RequestLines(tmp_path / "nowhere" / "requests.jsonl", with_prompts=False)


def test_a_line_that_cannot_be_written_fails_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    lines = RequestLines(folder / "requests.jsonl", with_prompts=False)
    folder.rename(tmp_path / "old")
    lines.write(line(0))
    assert "FileNotFoundError" in capsys.readouterr().err
    folder.mkdir()
    lines.write(line(1))
    lines.close()
    assert json.loads((folder / "requests.jsonl").read_text())["request_id"] == "r1"


def test_a_line_has_the_workers_of_each_epoch_and_why_each_choice_ended(model: Path) -> None:
    request = Request(model, n=2)
    request.outputs[0].on_tokens(gained(70, FinishReason.STOP), 0)
    request.generation.cancel()
    trace = RequestTrace("r", [1, 2], 1, [])
    trace.placements = [
        {"room": 1, "epoch": 0, "prefill": "p0", "decode": "d0"},
        {"room": 2, "epoch": 1, "prefill": None, "decode": "d1"},
    ]
    told = generated(request.generation, trace, None)
    assert told.ends == ["stop", "abort"]
    assert told.workers == [["p0", "d0"], ["d1"]]
    assert (told.restarts, told.prompts, told.ttft_s) == (1, None, None)
    assert error_name(Overloaded("full", 1.0, "places")) == "overloaded_places"
    both = replace(told, ttft_s=0.5, prompts=["a"]) + replace(told, ttft_s=2.0, prompts=["b"], kv_bytes=9)
    assert (both.choices, both.ends, both.workers) == (4, told.ends * 2, told.workers * 2)
    assert (both.restarts, both.ttft_s, both.prompts, both.kv_bytes) == (2, 0.5, ["a", "b"], 9)
    assert (told + told).prompts is None
