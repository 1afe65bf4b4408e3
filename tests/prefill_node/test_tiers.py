"""The host tier on both workers of a hand-off: pools so small that what is asked again must come back from
the host. Answers are the fake model's, or transformers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES
from kvcache.tiers.loads import MoveCounts
from tests.support.hand_off import GROUPS, Pair, held, pair, prompt_of, right
from tests.support.oracle import EVERY, covering
from tests.support.reference import reference_answers
from tests.support.tiny_models import make_tiny
from wire.messages.transfer import KVTarget
from worker.loop import Worker

CONVERSATIONS = 4
TURNS = 3
NEW_TOKENS = 8


def counts(worker: Worker) -> MoveCounts:
    """What has moved on a worker."""
    tiers = worker.parts.services.memory.tiers
    assert tiers is not None
    return tiers.moves.counts


def converse(both: Pair, prompts: list[list[int]], split: bool, policy: str) -> list[tuple[int, list[int]]]:
    """`TURNS` rounds over all conversations, which grow by the answer and a few tokens: (room, prompt). Each
    prompt comes twice where a second use is what sends it to the host."""
    asked, room = [], 0
    texts = [list(prompt) for prompt in prompts]
    for turn in range(TURNS):
        for number, text in enumerate(texts):
            for _ in range(2 if policy == "write_through_selective" else 1):
                room += 1
                both.ask(room, text, NEW_TOKENS, split)
                both.run_dry()
                assert both.outputs[room].finish is not None, both.outputs[room].rejected
                asked.append((room, list(text)))
            text += both.outputs[room].tokens
            text += [token % 250 for token in prompt_of(100 * turn + number, 13)]
    return asked


def settled(both: Pair) -> None:
    """Nothing is held on any tier."""
    both.settle(60.0)
    for worker in (both.prefill, both.decode):
        assert held(worker) == {}


@pytest.mark.covering
@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_storage_outlives_the_workers(groups: tuple[str, ...], policy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_total_tokens": 512,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "hicache_storage_path": tmp_path / "kv",
        "hicache_storage_prefetch_policy": policy,
        "hicache_storage_prefetch_threshold": 8,
        "hicache_storage_prefetch_if_slower": True,
    }
    prompts = [prompt_of(seed, 70) for seed in range(3)]
    computed, stored = [], []
    for _ in range(2):
        with pair(groups, **options) as both:
            for room, prompt in enumerate(prompts, start=1):
                both.ask(room, prompt, NEW_TOKENS)
                both.run_dry()
                assert both.outputs[room].tokens == right(both, room, groups)
            settled(both)
            counted = [worker.parts.role.scheduler.metrics for worker in (both.prefill, both.decode)]
            computed.append(sum(one.prefill_tokens for one in counted))
            stored.append(sum(one.cached_from["storage"] for one in counted))
    if policy != "best_effort":  # which waits for nothing
        assert computed[1] <= computed[0] / 4
        assert stored[0] < stored[1]


@pytest.mark.covering
@pytest.mark.parametrize("split", [True, False], ids=["apart", "colocated"])
@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_what_was_evicted_comes_back(groups: tuple[str, ...], policy: str, split: bool) -> None:
    options: dict[str, Any] = {"max_total_tokens": 128, "hicache_ratio": 8.0, "hicache_write_policy": policy}
    with pair(groups, **options) as both:
        for room, _ in converse(both, [prompt_of(seed, 40) for seed in range(CONVERSATIONS)], split, policy):
            assert both.outputs[room].tokens == right(both, room, groups)
        for worker in (both.prefill, both.decode) if split else (both.decode,):
            done = counts(worker)
            assert done.loads > 0, "nothing came back from the host"
            assert done.failed_loads == done.failed_backups == 0
            counted = worker.parts.role.scheduler.metrics
            assert counted.cached_from["host"] > 0
            assert counted.cached_from.total() == counted.cached_tokens
        settled(both)


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_prefill_is_asked_only_for_what_the_decode_worker_has_on_no_tier(groups: tuple[str, ...]) -> None:
    with pair(groups, hicache_ratio=4.0, hicache_decode_offload_tokens=8) as both:
        prompt = prompt_of(1, 70)
        both.ask(1, prompt, NEW_TOKENS)
        both.run_dry()
        memory = both.decode.parts.services.memory
        for group in memory.allocators:
            memory.cache.tree.evict(group, memory.num_pages)
        known = [*prompt, *both.outputs[1].tokens]
        both.ask(2, [*known, *prompt_of(2, 20)], NEW_TOKENS)
        letter = both.hold_back(KVTarget)
        assert isinstance(letter.message, KVTarget)
        brought = letter.message.groups["full"]
        assert counts(both.decode).loads == 1
        assert brought.first_page * memory.page_size >= len(known) - 2 * memory.page_size
        assert len(brought.page_ids) == -(-(len(known) + 20) // memory.page_size) - brought.first_page
        both.arrive(letter)
        both.run_dry()
        assert both.outputs[2].tokens == right(both, 2, groups)
        settled(both)


def test_a_first_use_is_no_second_one() -> None:
    """The prompt comes in several chunks, which are cached one after another, and once more at its end."""
    options: dict[str, Any] = {"hicache_ratio": 4.0, "hicache_write_policy": "write_through_selective"}
    with pair((), **options) as both:
        workers = (both.prefill, both.decode)
        prompt = prompt_of(1, 70)
        for room, pages in ((1, [0, 0]), (2, [17, 17])):  # of four tokens
            both.ask(room, prompt, NEW_TOKENS)
            both.run_dry()
            assert both.outputs[room].tokens == right(both, room, ())
            settled(both)
            assert [counts(worker).to_host_pages for worker in workers] == pages
            assert [w._scheduler.metrics.prompt_tokens for w in workers] == [70 * room, 70 * room]


CASES = covering([EVERY, WRITE_POLICIES, (True, False), (4, 16), (24, None)])


@pytest.mark.parametrize(
    ("family", "policy", "split", "page_size", "chunk"),
    [
        pytest.param(*case, marks=() if i % 9 == 0 else pytest.mark.oracle_full)
        for i, case in enumerate(CASES)
    ],
)
def test_the_oracle_with_every_prefix_from_the_host(
    family: str, policy: str, split: bool, page_size: int, chunk: int | None, tmp_path_factory: Any
) -> None:
    path: Path = make_tiny(family, tmp_path_factory.getbasetemp(), 3)
    options: dict[str, Any] = {
        "model": str(path),
        "engine": "transformers",
        "dtype": "float32",
        "threads": 1,
        "page_size": page_size,
        "chunked_prefill_size": chunk,
        "max_total_tokens": 192,
        "max_context_tokens": 160,
        "max_mamba_cache_size": 12,
        "mamba_track_interval": 16,
        "max_running_requests": 2,
        "hicache_ratio": 8.0,
        "hicache_write_policy": policy,
    }
    prompts = [[token % 250 for token in prompt_of(seed, 48)] for seed in range(CONVERSATIONS)]
    with pair(**options) as both:
        asked = converse(both, prompts, split, policy)
        answers = reference_answers(path, [prompt for _, prompt in asked], NEW_TOKENS)
        for (room, _), (expected, margin) in zip(asked, answers, strict=True):
            assert both.outputs[room].tokens == expected, f"room {room}, margin {margin}"
        assert counts(both.decode).loads > 0
        settled(both)
