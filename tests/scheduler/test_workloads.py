"""Random workloads: every request gets the expected tokens, and memory balances."""

from __future__ import annotations

import random

import pytest

from scheduler.config import SchedulerConfig
from scheduler.req import Req
from tests.scheduler.rig import EOS, GROUPS, VOCAB, Rig
from tests.support.oracle import seeds

BLOCKS = seeds(1, 5)
"""Blocks of seeds."""


def _prompt(rng: random.Random, prefixes: list[list[int]], longest: int) -> list[int]:
    shared = rng.choice(prefixes)[: rng.randint(0, longest)]
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    return (shared + own)[:longest]


def _play(
    seed: int,
    page_size: int,
    depth: int,
    aborts: bool,
    cache: str = "radix",
    groups: tuple[str, ...] = (),
) -> Rig:
    rng = random.Random(seed)
    tight, threaded = rng.random() < 0.6, rng.random() < 0.5
    pool = rng.randint(8, 14) * 16 if tight else 2048
    rig = Rig(
        page_size=page_size,
        pool_tokens=pool,
        max_context=128,
        engine_overlap=bool(depth) and threaded,
        prefix_cache=cache,
        groups=groups,
        window=[5, 20, 40][seed % 3],
        interval=[16, 32][seed % 2],
        tight=tight and seed % 4 < 2,
        eos=EOS if rng.random() < 0.5 else (),
        config=SchedulerConfig(
            model="m",
            max_running_requests=rng.choice([1, 2, 8]),
            chunked_prefill_size=rng.choice([1, 16, 32, 40, None]),
            max_prefill_tokens=rng.choice([16, 64, 8192]),
            last_chunk_tokens=rng.choice([0, 0, 16]),
            decode_reserve_tokens=rng.choice([0, 4, 512]),
            overlap_depth=depth,
        ),
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(90)] for _ in range(3)]
    live: list[Req] = []
    aborted: set[int] = set()
    for _ in range(rng.randint(3, 14)):
        prompt = _prompt(rng, prefixes, longest=80)
        max_new = rng.randint(1, 40)
        forced = rng.randint(0, max_new - 1) if rng.random() < 0.2 else 0
        sampling = {"min_tokens": rng.randint(0, 10), "stop_token_ids": (rng.randrange(VOCAB),)}
        priority = rng.choice([0, 0, 0, 1])
        live.append(rig.add(prompt, max_new, forced=forced, priority=priority, **sampling))
        for _ in range(rng.randint(0, 6)):
            rig.step()
        if aborts and rng.random() < 0.4:
            victim = rng.choice(live)
            if rig.scheduler.abort(victim.room, victim.epoch):
                aborted.add(victim.room)
            rig.check()
    rig.run()
    rig.assert_outputs(*aborted)
    for room in aborted:
        got = rig.policy.outputs.get(room, [])
        assert got == rig.expected[room][: len(got)]
    rig.close()
    return rig


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("aborts", [False, True], ids=["calm", "aborts"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_equal_the_oracle(page_size: int, depth: int, aborts: bool, block: int) -> None:
    for seed in range(block * 8, block * 8 + 8):
        _play(seed, page_size, depth, aborts)


@pytest.mark.covering("invariants")
@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.invariants)])
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("groups", GROUPS[1:], ids="+".join)
def test_tokens_equal_the_oracle_with_more_groups(
    groups: tuple[str, ...], page_size: int, depth: int, cache: str, block: int
) -> None:
    for seed in range(block * 4, block * 4 + 4):
        _play(300 + seed, page_size, depth, aborts=seed % 2 == 0, cache=cache, groups=groups)


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_random_workloads_reach_what_they_should(groups: tuple[str, ...]) -> None:
    """The workloads above must retract, evict, reuse and cut, or they would test little."""
    rigs = [_play(seed, 16, 1, aborts=False, groups=groups) for seed in range(12)]
    assert sum(rig.scheduler.metrics.retracted for rig in rigs) > 0
    assert sum(rig.scheduler.metrics.cached_tokens for rig in rigs) > 0
    assert sum(rig.scheduler.metrics.surplus_tokens for rig in rigs) > 0
    assert any(rig.policy.chunk_ends for rig in rigs)
    if "state" in groups:
        assert sum(rig.scheduler.metrics.cut_forwards for rig in rigs) > 0
        assert sum(rig.scheduler.metrics.checkpoints for rig in rigs) > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_depth_0_and_1_report_the_same(page_size: int) -> None:
    for seed in range(100, 110):
        calm, late = (_play(seed, page_size, depth, aborts=False) for depth in (0, 1))
        assert calm.policy.outputs == late.policy.outputs
        assert calm.policy.finished == late.policy.finished


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_equal_the_oracle_without_a_prefix_cache(page_size: int, depth: int) -> None:
    for seed in range(200, 206):
        rig = _play(seed, page_size, depth, aborts=True, cache="none")
        assert rig.scheduler.metrics.cached_tokens == 0
