"""A worker one of whose threads has died or is stuck leaves by itself; its streams go on elsewhere."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.fake import fake_generate
from tests.e2e.test_detection import ROUTER
from tests.e2e.test_failures import OPTIONS, OUTPUT_TOKENS, prompts, take, wait_until_busy
from tests.harness.local_stack import stack, wait_for_workers

STUCK_S = 2.0
SAID = {
    ("loop", "dies"): "the engine loop of {id} died",
    ("loop", "blocks"): "{id}: the engine loop has been stuck",
    ("mailbox", "dies"): "{id}: the mailbox thread has died",
    ("mailbox", "blocks"): "{id}: the mailbox thread has been stuck",
    ("events", "dies"): "{id}: the event thread has died",
    ("events", "blocks"): "{id}: the event thread has been stuck",
}


@pytest.mark.parametrize(
    ("thread", "fault"),
    [
        ("loop", "dies"),
        ("mailbox", "blocks"),
        pytest.param("loop", "blocks", marks=pytest.mark.invariants),
        pytest.param("mailbox", "dies", marks=pytest.mark.invariants),
        pytest.param("events", "dies", marks=pytest.mark.invariants),
        pytest.param("events", "blocks", marks=pytest.mark.invariants),
    ],
)
def test_a_worker_with_a_broken_thread_leaves_and_its_streams_go_on(
    tiny_model: Path, tmp_path: Path, thread: str, fault: str
) -> None:
    flag, asked = tmp_path / "broken", prompts(8, seed=12)
    runner = ("tests.support.breaks_thread", str(flag))
    options = {**OPTIONS, "stuck_after_s": STUCK_S}
    with stack(tiny_model, tmp_path / "stack", 1, 2, ROUTER, runner, **options) as running:
        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in asked]
            victim = take(running.decode, wait_until_busy(running))
            began = time.monotonic()
            whole = tmp_path / "whole"
            whole.write_text(f"{victim.process.pid} {thread} {fault}")
            whole.rename(flag)
            wait_for_workers(running, 2)
            assert time.monotonic() - began < 20.0, "far less than the lease"
            answers = [future.result(60.0) for future in futures]
        right = [fake_generate(prompt, OUTPUT_TOKENS) for prompt in asked]
        assert [answer["output_ids"] for answer in answers] == right
        assert victim.process.wait(30.0) == 1
        assert SAID[thread, fault].format(id=victim.ready["id"]) in victim.log.read_text()
        running.settle()
