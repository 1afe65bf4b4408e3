"""Workers of several ranks: a rank that dies takes its worker with it, a worker its ranks, and no stream."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.test_failures import ROUTER, take, wait_until_busy
from tests.harness.local_stack import stack, wait_for_workers
from tests.harness.processes import Child
from tests.support.children import children_of
from tests.support.reference import draw_model

OUTPUT_TOKENS = 400
OPTIONS = {"dtype": "float32", "threads": 1, "max_total_tokens": 4096}


def kill_rank(worker: Child, rank: int) -> None:
    os.kill(rank, signal.SIGKILL)
    assert worker.process.wait(30.0) == 1
    assert "rank 1 has ended" in worker.log.read_text() or "out of step" in worker.log.read_text()


def kill_worker(worker: Child, rank: int) -> None:
    del rank
    worker.kill()


@pytest.mark.parametrize("kill", [kill_rank, pytest.param(kill_worker, marks=pytest.mark.invariants)])
def test_a_worker_dies_with_its_ranks_and_its_streams_go_on(
    kill: Callable[[Child, int], None], tmp_path: Path
) -> None:
    rng = random.Random("ranks")
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (5, 40, 70)]
    path, answers = draw_model("llama", tmp_path, 0, prompts, [OUTPUT_TOKENS] * len(prompts))
    ranks = {"decode": {"tp_size": 2}}
    with stack(path, tmp_path / "stack", 1, 2, ROUTER, by_role=ranks, **OPTIONS) as running:
        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(running.generate, prompt, OUTPUT_TOKENS) for prompt in prompts]
            victim = take(running.decode, wait_until_busy(running, rooms=1))
            (rank,) = children_of(victim.process.pid)
            kill(victim, rank)
            found = [future.result(60.0)["output_ids"] for future in futures]
        assert found == answers
        deadline = time.monotonic() + 10.0
        while Path(f"/proc/{rank}").exists():
            assert time.monotonic() < deadline, "the rank goes on without its worker"
            time.sleep(0.05)
        wait_for_workers(running, 2)
        running.settle()


@pytest.mark.parametrize("prefill_ranks", [pytest.param(1, marks=pytest.mark.invariants), 2])
def test_pages_that_lie_in_several_memories_are_handed_over_and_kept_on_the_host(
    prefill_ranks: int, tmp_path: Path
) -> None:
    """The pools are so small that what was asked before comes back from the host."""
    rng = random.Random("divided")
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (130, 150, 170)]
    path, answers = draw_model("gemma3_text", tmp_path, 0, prompts, [24] * len(prompts))
    ranks = {"prefill": {"tp_size": prefill_ranks}, "decode": {"tp_size": 2}}
    options = {**OPTIONS, "max_total_tokens": 256, "hicache_ratio": 4.0, "chunked_prefill_size": 64}
    runner = ("tests.support.divided_ranks",)
    with stack(path, tmp_path / "stack", 1, 1, ROUTER, runner, by_role=ranks, **options) as running:
        cached = []
        for _ in range(2):
            for prompt, answer in zip(prompts, answers, strict=True):
                found = running.generate(prompt, 24)
                assert found["output_ids"] == answer
                cached.append(found["meta_info"]["cached_tokens"])
        assert cached[:3] == [0, 0, 0]
        assert min(cached[3:]) >= 112, "from the host"
        running.settle()
