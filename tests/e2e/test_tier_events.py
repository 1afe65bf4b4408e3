"""The router's index against the trees of real workers, by tier: device, host and storage, while workers are
killed, started again, and cleared.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.fake import fake_generate
from tests.harness.local_stack import Stack, wait_for_workers
from tests.harness.processes import Child
from tests.support.kv_events_reader import pages_by_medium
from tests.support.tiered_stack import PAGE_SIZE, tiered, wait_until_stored

NEW_TOKENS = 16
AGREED_S = 10.0
MEDIA = {"GPU": "device", "CPU": "host", "STORAGE": "storage"}


def prompts(seed: int, count: int = 16) -> list[list[int]]:
    """Conversations of which every fourth begins alike."""
    draw = random.Random(seed)
    shared = [[draw.randrange(250) for _ in range(96)] for _ in range(4)]
    return [
        [*shared[i % 4][: draw.randrange(97)], *(draw.randrange(250) for _ in range(draw.randrange(20, 90)))]
        for i in range(count)
    ]


def assert_right(running: Stack, asked: list[list[int]], groups: tuple[str, ...]) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: running.generate(prompt, NEW_TOKENS), asked))
    assert [answer["output_ids"] for answer in answers] == [
        fake_generate(prompt, NEW_TOKENS, groups=groups) for prompt in asked
    ]


def held(running: Stack, worker: Child) -> dict[str, set[int]]:
    """What a worker holds, by tier, from its own tree. Its pools say the same."""
    nodes, memory = (running.inspect(worker, what) for what in ("nodes", "memory"))
    by_medium = pages_by_medium(nodes, "m", PAGE_SIZE)
    host = running.inspect(worker, "tiers")["host"]["full"]
    assert len(by_medium["GPU"]) == memory["evictable_pages"] + memory["protected_pages"]
    assert len(by_medium["CPU"]) == host["total"] - host["free"]
    return {tier: by_medium[medium] for medium, tier in MEDIA.items()}


def indexed(running: Stack, worker: Child) -> dict[str, set[int]]:
    """What the router believes of it."""
    answer = running.admin.get("/debug/index", params={"worker": worker.ready["id"]})
    assert answer.status_code == 200, answer.text
    return {tier: set(names) for tier, names in answer.json().items()}


def agree(running: Stack) -> dict[str, int]:
    """Wait until the router and every worker say the same. How many pages all hold, by tier."""
    running.settle()
    wait_until_stored(running)
    total = dict.fromkeys(MEDIA.values(), 0)
    for worker in running.workers:
        deadline = time.monotonic() + AGREED_S
        while (told := indexed(running, worker)) != (has := held(running, worker)):
            differ = {tier: len(told[tier] ^ has[tier]) for tier in has}
            assert time.monotonic() < deadline, f"{worker.ready['id']} and the index differ: {differ}"
        for tier, pages in has.items():
            total[tier] += len(pages)
    return total


@pytest.mark.parametrize(
    "groups",
    [(), pytest.param(("window", "state"), marks=pytest.mark.e2e)],
    ids=["full", "hybrid"],
)
def test_the_index_is_what_workers_hold_on_each_tier(
    groups: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "engine": "fake", "fake_step_s": 0.002, "fake_groups": groups, "hicache_ratio": 1.5,
        "kv_events_config": {"buffer_batches": 8},
    }  # fmt: skip
    with tiered(tiny_model, tmp_path / "one", tmp_path / "kv", router={"policy": "kv"}, **options) as running:
        assert_right(running, prompts(1), groups)
        assert_right(running, prompts(1)[::-1], groups)
        everywhere = agree(running)
        assert min(everywhere.values()) > 20
        for seed, nodes in enumerate((running.prefill, running.decode), start=2):
            victim = nodes[0]
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(assert_right, running, prompts(seed), groups)
                wait_until_busy(running, victim)
                victim.kill()
                asking.result(60.0)
            wait_until_gone(running, victim)
            nodes.remove(victim)
            agree(running)
            nodes.insert(0, victim)
            running.start_again(victim)
            assert indexed(running, nodes[0]) == {tier: set() for tier in MEDIA.values()}
            assert_right(running, prompts(seed), groups)
            agree(running)
        running.admin.post("/admin/cache/clear", params={"tier": "host"}).raise_for_status()
        assert agree(running)["host"] < everywhere["host"]
        running.admin.post("/admin/cache/clear", params={"tier": "all"}).raise_for_status()
        assert set(agree(running).values()) == {0}


def wait_until_busy(running: Stack, worker: Child) -> None:
    """Until a request runs there."""
    deadline = time.monotonic() + AGREED_S
    while not running.inspect(worker, "load")["running_requests"]:
        assert time.monotonic() < deadline, "nothing ever ran there"


def wait_until_gone(running: Stack, worker: Child) -> None:
    """Until its lease has ended: its pages are in the index no more."""
    wait_for_workers(running, len(running.workers) - 1)
    gone = running.admin.get("/debug/index", params={"worker": worker.ready["id"]})
    assert gone.status_code == 400, "the router has dropped it"
