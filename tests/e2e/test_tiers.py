"""Conversations over a storage that several workers share, in real processes: what one has computed none
computes again, whoever gets the next turn, whoever was killed in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness.local_stack import stack
from tests.kvcache.storage.support import MooncakeMaster
from tests.support.reference import draw_model, reference_generate
from tests.support.tiered_stack import (
    PAGE_SIZE,
    STORED_S,
    computed,
    refused,
    storages,
    tiered,
    wait_until_stored,
)

NEW_TOKENS = 12
SAID = 21  # tokens of a turn
LONG_ANSWER = 300


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """The one that the workers of a test know."""
    why = MooncakeMaster.why_not()
    if why:
        pytest.skip(why)
    with closing(MooncakeMaster(tmp_path / "master.log")) as started:
        yield started


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_next"])
def test_six_turns_compute_each_page_once(family: str, tmp_path: Path) -> None:
    six_turns(family, tmp_path)


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(one, marks=pytest.mark.e2e) for one in ("gpt_oss", "qwen3_next"))]
)
def test_six_turns_over_mooncake_store_compute_each_page_once(
    family: str, tmp_path: Path, master: MooncakeMaster
) -> None:
    """Each worker lends 20 MB, so a page that is read may lie in the memory of any of the others."""
    six_turns(
        family, tmp_path, hicache_storage_backend="mooncake", hicache_storage_url=master.url,
        hicache_storage_size=0.02,
    )  # fmt: skip


def six_turns(family: str, tmp_path: Path, **options: Any) -> None:
    """A conversation whose turns alternate between two prefill and two decode workers."""
    draw = random.Random(5)
    text = [draw.randrange(250) for _ in range(60)]
    model, _ = draw_model(family, tmp_path / "models", 3, [text], NEW_TOKENS)
    with tiered(model, tmp_path / "one", tmp_path / "kv", **options) as running:
        known = 0
        for turn in range(6):
            before = computed(running)
            answer = running.generate(text, NEW_TOKENS)["output_ids"]
            assert answer == reference_generate(model, text, NEW_TOKENS)[0]
            running.settle()
            wait_until_stored(running)
            spent = computed(running) - before
            new = len(text) - known // PAGE_SIZE * PAGE_SIZE
            assert spent <= new + PAGE_SIZE, f"turn {turn} computes {spent} tokens for {new} new ones"
            known = len(text) + NEW_TOKENS - 1
            text = [*text, *answer, *(draw.randrange(250) for _ in range(SAID))]
        assert refused(running) == {}
        for worker in running.prefill:
            read = running.inspect(worker, "tiers")["storage"]["read_pages"]
            assert read > 0, "it has not read what the other one computed"


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3_next"]
    + [pytest.param(other, marks=pytest.mark.oracle_full) for other in ("gemma3_text", "deepseek_v3")],
)
def test_prompts_that_wait_are_sent_from_the_host(family: str, tmp_path: Path) -> None:
    """One prefill worker, whose device holds half of the prompts, and two decode workers in turn."""
    draw = random.Random(7)
    prompts = [[draw.randrange(250) for _ in range(130)] for _ in range(7)]
    model, answers = draw_model(family, tmp_path / "models", 3, prompts, NEW_TOKENS)
    options = {
        "dtype": "float32",
        "threads": 1,
        "page_size": PAGE_SIZE,
        "chunked_prefill_size": 64,
        "max_total_tokens": 512,
        "max_context_tokens": 256,
        "mamba_track_interval": PAGE_SIZE,
        "max_running_requests": 4,
        "hicache_ratio": 4.0,
        "hicache_write_policy": "write_back",
    }
    router = {"policy": "round-robin", "prefill_on_decode_tokens": 0}
    with stack(model, tmp_path, 1, 2, router=router, **options) as running:
        for _ in range(3):
            found = running.generate_all(prompts, NEW_TOKENS)
            assert [answer["output_ids"] for answer in found] == answers
            running.settle()
        report = running.inspect(running.prefill[0], "tiers")
        assert report["reads"]["host_pages"] > 0
        assert report["reads"]["failed"] == 0


def test_killed_workers_leave_a_storage_that_serves(tmp_path: Path) -> None:
    draw = random.Random(6)
    prompts = [[draw.randrange(250) for _ in range(150)] for _ in range(4)]
    model, _ = draw_model("qwen3", tmp_path / "models", 3, prompts, NEW_TOKENS)
    with tiered(model, tmp_path / "one", tmp_path / "kv") as running:
        running.generate_all(prompts, NEW_TOKENS)
        for worker in running.workers:
            worker.kill()
    with tiered(model, tmp_path / "two", tmp_path / "kv") as running:
        for prompt in prompts:
            answer = running.generate(prompt, NEW_TOKENS)["output_ids"]
            assert answer == reference_generate(model, prompt, NEW_TOKENS)[0]
        running.settle()
        assert sum(one["read_pages"] for one in storages(running)) > 0
        assert refused(running) == {}, "a torn page was found"


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_next"])
def test_a_long_answer_outlives_its_decode_worker(family: str, tmp_path: Path) -> None:
    draw = random.Random(7)
    prompt = [draw.randrange(250) for _ in range(45)]
    model, (answer,) = draw_model(family, tmp_path / "models", 3, [prompt], 68)
    known = [*prompt, *answer[:60]]
    options = {"hicache_decode_offload_tokens": 2 * PAGE_SIZE}
    with (
        tiered(model, tmp_path / "one", tmp_path / "kv", 1, 1, **options) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(running.generate, prompt, LONG_ANSWER)
        deadline = time.monotonic() + STORED_S
        decode, pages = running.decode[0], len(known) // PAGE_SIZE
        while running.inspect(decode, "tiers")["storage"]["written_pages"] < pages:
            assert time.monotonic() < deadline, "nothing of the answer comes to storage"
            assert not asked.done(), "the answer has ended before its worker was killed"
        for child in (*running.workers, running.router):
            child.kill()
        assert asked.exception(STORED_S) is not None
    with tiered(model, tmp_path / "two", tmp_path / "kv", 1, 1, **options) as running:
        assert running.generate(known, 8)["output_ids"] == answer[60:68]
        running.settle()
        assert computed(running) <= 2 * PAGE_SIZE
