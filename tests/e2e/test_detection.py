"""A worker that is killed or stopped is noticed long before its lease ends; its streams go on elsewhere."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.fake import fake_generate
from tests.e2e.test_failures import OPTIONS, OUTPUT_TOKENS, prompts, take, wait_until_busy
from tests.harness.local_stack import Stack, stack, wait_for_workers

LEASE_S = 60.0  # longer than the test: a lease does not help
ROUTER: dict[str, Any] = {"prefill_on_decode_tokens": 0, "max_queued": 0, "lease_s": LEASE_S}


def suspicions(running: Stack) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = running.admin.get("/debug/suspicions").json()["suspicions"]
    return rows


def until_cleared(running: Stack) -> None:
    deadline = time.monotonic() + 20.0
    while any(row["cleared_at_unix"] is None for row in suspicions(running)):
        assert time.monotonic() < deadline, "the worker is up again and still suspected"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "exited"), (signal.SIGSTOP, "unreachable")])
def test_a_silent_worker_is_suspected_and_its_streams_go_on(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, cause: str
) -> None:
    asked = prompts(8, seed=11)
    with stack(tiny_model, tmp_path, prefill=1, decode=2, router=ROUTER, **OPTIONS) as running:
        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked]
            victim = wait_until_busy(running)
            at = time.time()
            victim.process.send_signal(number)
            answers = [future.result(60.0) for future in futures]
        right = [fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked]
        assert [answer["output_ids"] for answer in answers] == right
        (row,) = suspicions(running)
        assert (row["worker"], row["cause"]) == (victim.ready["id"], cause)
        assert 0 < row["at_unix"] - at < 10.0, "2 s on a machine that is not busy"
        if number is signal.SIGSTOP:
            assert running.admin.get("/metrics").text.count('suspicions_total{cause="unreachable"} 1.0') == 1
            victim.process.send_signal(signal.SIGCONT)
            until_cleared(running)
            wait_for_workers(running, 3)
        else:
            take(running.decode, victim)
        running.settle()
