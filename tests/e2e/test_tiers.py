"""Conversations over a storage that several workers share, in real processes: what one has computed none
computes again, whoever gets the next turn, whoever was killed in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.local_stack import Stack, stack
from tests.support.reference import draw_model, reference_generate

PAGE_SIZE = 8
NEW_TOKENS = 12
SAID = 21  # tokens of a turn
STORED_S = 20.0


@contextmanager
def serving(model: Path, directory: Path, storage: Path, **options: Any) -> Iterator[Stack]:
    """2P + 2D in turn, whose device pools hold little more than one conversation."""
    directory.mkdir(exist_ok=True)
    chosen = {
        "dtype": "float32",
        "threads": 1,
        "page_size": PAGE_SIZE,
        "chunked_prefill_size": 64,
        "max_total_tokens": 512,
        "max_context_tokens": 384,
        "mamba_track_interval": PAGE_SIZE,
        "max_running_requests": 4,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "file",
        "hicache_storage_path": str(storage),
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_prefetch_threshold": PAGE_SIZE,
        "hicache_storage_prefetch_if_slower": True,
        **options,
    }
    router = {"policy": "round-robin", "prefill_on_decode_tokens": 0}
    with stack(model, directory, 2, 2, router=router, **chosen) as running:
        yield running


def stored(running: Stack) -> None:
    """Wait until every worker has written what it has cached."""
    deadline = time.monotonic() + STORED_S
    for worker in running.workers:
        while not running.inspect(worker, "tiers")["is_idle"]:
            assert time.monotonic() < deadline, f"{worker.ready} never stops moving"


def computed(running: Stack) -> int:
    """Tokens that prefill chunks have computed on all workers."""
    return sum(running.inspect(worker, "metrics")["prefill_tokens"] for worker in running.workers)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_next"])
def test_six_turns_compute_each_page_once(family: str, tmp_path: Path) -> None:
    draw = random.Random(5)
    text = [draw.randrange(250) for _ in range(60)]
    model, _ = draw_model(family, tmp_path / "models", 3, [text], NEW_TOKENS)
    with serving(model, tmp_path / "one", tmp_path / "kv") as running:
        known = 0
        for turn in range(6):
            before = computed(running)
            answer = running.generate(text, NEW_TOKENS)["output_ids"]
            assert answer == reference_generate(model, text, NEW_TOKENS)[0]
            running.settle()
            stored(running)
            spent = computed(running) - before
            new = len(text) - known // PAGE_SIZE * PAGE_SIZE
            assert spent <= new + PAGE_SIZE, f"turn {turn} computes {spent} tokens for {new} new ones"
            known = len(text) + NEW_TOKENS - 1
            text = [*text, *answer, *(draw.randrange(250) for _ in range(SAID))]


def test_killed_workers_leave_a_storage_that_serves(tmp_path: Path) -> None:
    draw = random.Random(6)
    prompts = [[draw.randrange(250) for _ in range(150)] for _ in range(4)]
    model, _ = draw_model("qwen3", tmp_path / "models", 3, prompts, NEW_TOKENS)
    with serving(model, tmp_path / "one", tmp_path / "kv") as running:
        running.generate_all(prompts, NEW_TOKENS)
        for worker in running.workers:
            worker.kill()
    with serving(model, tmp_path / "two", tmp_path / "kv") as running:
        for prompt in prompts:
            answer = running.generate(prompt, NEW_TOKENS)["output_ids"]
            assert answer == reference_generate(model, prompt, NEW_TOKENS)[0]
        running.settle()
        reports = [running.inspect(worker, "tiers")["storage"] for worker in running.workers]
        assert sum(report["read_pages"] for report in reports) > 0
        assert not any(report["refused"] for report in reports), "a torn page was found"
