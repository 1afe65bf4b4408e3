"""What processes hold for each other is listed while they hold it, and a healthy run sweeps none of it."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.harness.local_stack import Stack, stack

OPTIONS: dict[str, Any] = {"engine": "fake", "fake_step_s": 0.01, "max_total_tokens": 4096}


def leases(running: Stack) -> dict[str, Any]:
    """Connections are kept for minutes after their last message."""
    answer: dict[str, Any] = running.admin.get("/debug/leases").json()
    answer["leases"] = [row for row in answer["leases"] if row["what"] != "connection"]
    return answer


def leave_early(running: Stack, number: int) -> None:
    """A client that goes after its first event."""
    body = {"model": "m", "prompt": [number] * 40, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return


def ends_with_a_stop(running: Stack, number: int) -> None:
    body = {"model": "m", "prompt": [number] * 30, "max_tokens": 200, "stop": ["a", "e", "1", " "]}
    assert running.http.post("/v1/completions", json=body).status_code == 200


def swept_by_router(running: Stack) -> float:
    text = running.admin.get("/metrics").text
    return sum(
        float(n) for n in re.findall(r"^baton_router_swept_holds_total\{.*\} (\S+)$", text, re.MULTILINE)
    )


def test_a_healthy_run_sweeps_nothing_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with stack(tiny_model, tmp_path, 1, 1, {"prefill_on_decode_tokens": 0}, **OPTIONS) as running:
        body = {"model": "m", "prompt": [1] * 40, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with running.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # the connection closes when this is dropped
            next(line for line in lines if line.startswith("data: "))
            held = leases(running)
            (decode,) = (worker["id"] for worker in _workers(running) if worker["role"] == "decode")
            rooms = {(row["holder"].split()[0], row["what"].split(",")[0]) for row in held["leases"]}
            assert {("router", "room"), (decode, "room")} <= rooms
            assert held["silent"] == []
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(leave_early, running, number) for number in range(4)]
            jobs += [pool.submit(ends_with_a_stop, running, number) for number in range(4)]
            jobs += [pool.submit(running.generate, [number] * 50, 30) for number in range(8)]
            for job in jobs:
                job.result(60.0)
        running.settle()
        deadline = time.monotonic() + 30.0
        while (held := leases(running))["leases"]:
            assert time.monotonic() < deadline, held
            time.sleep(0.1)
        assert {count for kinds in held["swept"].values() for count in kinds.values()} == {0}
        assert len(held["swept"]) == 2
        assert swept_by_router(running) == 0
        said = re.findall(
            r'^baton_worker_swept_holds_total\{kind="(.*)",worker="(.*)"\} 0.0$',
            running.admin.get("/metrics").text,
            re.MULTILINE,
        )
        assert {worker for _, worker in said} == {worker["id"] for worker in _workers(running)}
        assert {kind for kind, _ in said} == {"output", "message", "parked message"}


def _workers(running: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = running.admin.get("/debug/workers").json()["workers"]
    return found
