"""Models with a window or a state beside full attention, served by prefill and decode apart.

What each worker says over its event stream, replayed by an independent reader, must be its tree: also while
states and windows are given up silently, which only the tree itself can tell.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.fake import fake_generate
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.support.kv_events_reader import Page, Pages, ends_of, pages_of, replayed
from tests.support.reference import draw_model

PAGE_SIZE = 8
GROUPS = ("window", "state")


@pytest.fixture(scope="module")
def hybrid(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """1P + 1D; every group runs short: states first, then windows, at last the full group's pages."""
    with stack(
        tiny_model,
        tmp_path_factory.mktemp("hybrid"),
        router={"prefill_on_decode_tokens": 0, "max_queued": 0},
        engine="fake",
        fake_groups=GROUPS,
        page_size=PAGE_SIZE,
        chunked_prefill_size=32,
        max_total_tokens=2048,
        swa_full_tokens_ratio=0.5,
        max_mamba_cache_size=36,
        eviction_policy="fifo",  # the oldest node is an inner one: its window and state go, its pages stay
        mamba_track_interval=16,
        max_running_requests=8,
        decode_reserve_tokens=32,
    ) as running:
        yield running


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def events_of(running: Stack, worker: Child) -> Pages:
    """What a worker's events add up to."""
    records = {record["id"]: record for record in running.admin.get("/debug/workers").json()["workers"]}
    pages = Pages("m")
    pages.apply(replayed(records[worker.ready["id"]]["replay"]))
    return pages


class Seen:
    """A worker's tree at some moment, held against its events."""

    def __init__(self, running: Stack, worker: Child) -> None:
        self.nodes: list[dict[str, Any]] = running.inspect(worker, "nodes")
        self.pages: dict[int, Page] = pages_of(self.nodes, "m", PAGE_SIZE)
        self.events = events_of(running, worker)
        assert self.pages == self.events.held
        ends = ends_of(self.nodes, "m", PAGE_SIZE)
        self.states = {
            end for end, node in zip(ends, self.nodes, strict=True) if node["held"].get("state", 0)
        }
        parents = {node["parent"] for node in self.nodes}
        for index, node in enumerate(self.nodes):
            if index not in parents:
                assert all(node["held"].values()), "a leaf that nobody can continue from"

    def window_holes(self) -> bool:
        """Whether some node has lost window pages and kept the others."""
        return any(node["held"]["window"] * PAGE_SIZE < node["held"]["full"] for node in self.nodes)


def test_events_are_the_tree_whatever_is_evicted(hybrid: Stack) -> None:
    """Turns of eight prompts, until every worker has evicted pages, and states whose pages stayed."""
    rng = random.Random(21)
    shared = [tokens(rng, 64), tokens(rng, 96), tokens(rng, 40)]
    before: dict[str, Seen] = {}
    silent = {worker.ready["id"]: 0 for worker in hybrid.workers}
    holes = False
    for turn in range(15):
        # A prompt of whole pages leaves decode a state at its end, which the next turn's prompts go on from.
        lengths = [PAGE_SIZE * rng.randrange(1, 6) if i < 3 else rng.randrange(1, 90) for i in range(8)]
        prompts = [shared[i % 3] + tokens(rng, length) for i, length in enumerate(lengths)]
        answers = hybrid.generate_all(prompts, 40)
        right = [fake_generate(prompt, 40, groups=GROUPS) for prompt in prompts]
        assert [answer["output_ids"] for answer in answers] == right
        shared[turn % 3] = prompts[turn % 3] if turn % 6 < 5 else tokens(rng, 48)
        hybrid.settle()
        for worker in hybrid.workers:
            name, seen = worker.ready["id"], Seen(hybrid, worker)
            if name in before:
                silent[name] += len((before[name].states - seen.states) & set(seen.pages))
            before[name] = seen
            holes |= seen.window_holes()
        if holes and all(silent.values()) and all(seen.events.removed for seen in before.values()):
            return
    raise AssertionError(f"too little was evicted: states {silent}, window pages {holes}")


def test_a_repeat_and_a_next_turn_are_found_in_the_cache(hybrid: Stack) -> None:
    rng = random.Random(22)
    prompt = tokens(rng, 120)
    first = hybrid.generate(prompt, 40)
    again = hybrid.generate(prompt, 40)
    assert again["output_ids"] == first["output_ids"] == fake_generate(prompt, 40, groups=GROUPS)
    assert again["meta_info"]["cached_tokens"] == 112, "up to the last page border before the end"
    forked = prompt[:100] + tokens(rng, 30)
    answers = [hybrid.generate(forked, 8) for _ in range(2)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"] == fake_generate(forked, 8, groups=GROUPS)
    assert answers[1]["meta_info"]["cached_tokens"] == 128
    hybrid.settle()


REAL = [
    "qwen3_next",
    *(
        pytest.param(family, marks=pytest.mark.oracle_full)
        for family in ("falcon_h1", "gemma3_text", "mistral_window", "deepseek_v2")
    ),
]
"""Linear attention; attention and Mamba in one layer; windows and full; windows alone; latents."""


@pytest.mark.parametrize("family", REAL)
def test_real_layers_answer_as_transformers_do_and_tell_what_they_hold(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cold, repeated, forked and continued prompts; whole pages and ragged ends; all at once at the end."""
    rng = random.Random(family)
    start = tokens(rng, 70)
    prompts = [start, start[:40] + tokens(rng, 25), start + tokens(rng, 10), tokens(rng, 64), tokens(rng, 7)]
    path, answers = draw_model(family, tmp_path_factory.mktemp("models"), 1, prompts, 40)
    with stack(
        path,
        tmp_path_factory.mktemp(family),
        router={"prefill_on_decode_tokens": 0, "max_queued": 0},
        dtype="float32",
        threads=1,
        page_size=PAGE_SIZE,
        chunked_prefill_size=24,
        max_total_tokens=1024,
        mamba_track_interval=16,
        max_running_requests=8,
        decode_reserve_tokens=64,
        kv_checksums="all",
    ) as running:
        for turn in range(2):
            for prompt, right in zip(prompts, answers, strict=True):
                answer = running.generate(prompt, 40)
                assert answer["output_ids"] == right
                if turn:
                    assert answer["meta_info"]["cached_tokens"] == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        found = running.generate_all(prompts, 40)
        assert [answer["output_ids"] for answer in found] == answers
        running.settle()
        for worker in running.workers:
            assert len(Seen(running, worker).pages) > 20
