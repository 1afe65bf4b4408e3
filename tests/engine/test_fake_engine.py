"""The fake engine is deterministic, and any wrong page shows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch, StateSlots, WindowPages
from engine.fake import FakeEngine, FakeTiming, fake_generate, fake_spec
from kvcache.layout import KVGroupSpec, StateGroupSpec
from kvcache.pool import KVCache, MambaPool, MHAKVCache
from tests.support.driver import Driver, Lane
from wire.request import SamplingParams

_random = random.Random(3)
PROMPTS = [[_random.randrange(32768) for _ in range(n)] for n in (1, 20, 47)]
PAGES = 60
WINDOW = 10
GROUPS = [(), ("window",), ("state",), ("window", "state")]


class FakeDriver(Driver):
    """A Driver with one page table for the full and the window group, in which a step's batch holds only the
    pages that its window needs, and with two state slots a lane: one is read, the other written."""

    def __init__(self, engine: FakeEngine, page_size: int) -> None:
        super().__init__(engine, PAGES, page_size)
        self.kinds = {group.kind for group in engine.spec.groups}

    def batch(self, work: Sequence[tuple[Lane, int]], unknown: bool = False) -> ForwardBatch:
        starts = [lane.done for lane, _ in work]
        batch = super().batch(work, unknown)
        if "window" in self.kinds:
            table = batch.page_table.copy()
            for row, start in zip(table, starts, strict=True):
                row[: max(0, start - WINDOW + 1) // self.page_size] = 0
            batch = replace(batch, window=WindowPages(table, batch.out_slots))
        if "state" in self.kinds:
            flips = [start % 2 for start in starts]
            first = [2 * lane.row - 1 for lane, _ in work]
            reads = [
                slot + flip if start else 0 for slot, flip, start in zip(first, flips, starts, strict=True)
            ]
            writes = [2 * lane.row - 1 + lane.done % 2 for lane, _ in work]
            batch = replace(batch, state=StateSlots(np.array(reads, np.int32), np.array(writes, np.int32)))
        return batch


def open_fake(
    page_size: int = 4, overlap: bool = False, groups: Sequence[str] = (), **timing: float
) -> tuple[Driver, dict[str, KVCache]]:
    spec = fake_spec(groups=groups, window=WINDOW)
    pools: dict[str, KVCache] = {}
    for group in spec.groups:
        if isinstance(group, KVGroupSpec):
            pools[group.name] = MHAKVCache(group, PAGES, page_size)
        elif isinstance(group, StateGroupSpec):
            pools[group.name] = MambaPool(group, 2 * len(PROMPTS))
    for pool in pools.values():
        pool.bytes.fill_(0x2A)  # what nobody wrote is not 0
    return FakeDriver(FakeEngine(spec, pools, FakeTiming(**timing), overlap), page_size), pools


def oracle(prompt: Sequence[int], n: int, groups: Sequence[str]) -> list[int]:
    return fake_generate(prompt, n, groups=groups, window=WINDOW)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("chunk", "stagger"), [(1 << 20, 0), (7, 0), (3, 5)])
@pytest.mark.parametrize("overlap", [False, True])
def test_output_equals_the_oracle(chunk: int, stagger: int, overlap: bool, groups: tuple[str, ...]) -> None:
    driver, _ = open_fake(overlap=overlap, groups=groups)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, 16, chunk, stagger)
    driver.engine.close()
    assert [lane.outputs for lane in lanes] == [oracle(prompt, 16, groups) for prompt in PROMPTS]


def test_every_group_changes_the_output() -> None:
    outputs = [tuple(oracle(PROMPTS[1], 8, groups)) for groups in GROUPS]
    assert len(set(outputs)) == len(GROUPS)
    assert fake_generate(PROMPTS[2], 4, groups=("window",), window=9) != oracle(PROMPTS[2], 4, ("window",))


def test_unknown_tokens_are_the_last_sampled_ones() -> None:
    driver, _ = open_fake(overlap=True)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    pending = [driver.engine.launch(driver.batch([(lane, lane.prompt_len) for lane in lanes]))]
    for i in range(9):  # in another order each time
        order = lanes[i % 3 :] + lanes[: i % 3]
        pending.append(driver.engine.launch(driver.batch([(lane, 1) for lane in order], unknown=True)))
    rounds = [launched.result(10).tokens.tolist() for launched in pending]
    straight = [rounds[0]] + [r[-(i % 3) :] + r[: -(i % 3)] if i % 3 else r for i, r in enumerate(rounds[1:])]
    driver.engine.close()
    assert [list(tokens) for tokens in zip(*straight, strict=True)] == [fake_generate(p, 10) for p in PROMPTS]


def lose(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    pools["full"].bytes[lane.pages[2]] = 0


def go_stale(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    pools["full"].bytes[lane.pages[2]] = pools["full"].bytes[other.pages[2]]


def swap(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    lane.pages[1], lane.pages[2] = lane.pages[2], lane.pages[1]


def lose_window(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    pools["window"].bytes[lane.pages[-2]] = 0


def go_stale_in_the_window(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    pools["window"].bytes[lane.pages[-2]] = pools["window"].bytes[other.pages[-2]]


def lose_state(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    pools["state"].bytes[2 * lane.row - 1 : 2 * lane.row + 1] = 0


def read_anothers_state(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    states = pools["state"].bytes
    states[2 * lane.row - 1 : 2 * lane.row + 1] = states[2 * other.row - 1 : 2 * other.row + 1]


def read_an_older_state(pools: dict[str, KVCache], lane: Lane, other: Lane) -> None:
    states = pools["state"].bytes
    states[2 * lane.row - 1 + lane.done % 2] = states[2 * lane.row - lane.done % 2]


@pytest.mark.parametrize(
    "damage",
    [
        lose,
        go_stale,
        swap,
        lose_window,
        go_stale_in_the_window,
        lose_state,
        read_anothers_state,
        read_an_older_state,
    ],
)
def test_damage_changes_the_output(damage: Callable[[dict[str, KVCache], Lane, Lane], None]) -> None:
    groups = GROUPS[-1]
    driver, pools = open_fake(groups=groups)
    lane, other = driver.add(PROMPTS[1]), driver.add(PROMPTS[2])
    driver.generate([lane, other], 2)
    damage(pools, lane, other)
    driver.generate([lane, other], 6)
    assert lane.outputs[:2] == oracle(PROMPTS[1], 2, groups)
    assert lane.outputs[2] != oracle(PROMPTS[1], 3, groups)[2]
    assert other.outputs == oracle(PROMPTS[2], 6, groups)


def test_a_window_page_that_only_a_chunk_sees_is_missed_too() -> None:
    """The chunk's first token sees it, its last does not."""
    groups = ("window",)
    driver, pools = open_fake(groups=groups)
    lane = driver.add(PROMPTS[2])
    driver.step([(lane, 12)])
    pools["window"].bytes[lane.pages[1]] = 0
    driver.step([(lane, 35)])
    assert lane.outputs != oracle(PROMPTS[2], 1, groups)


def test_forwards_take_as_long_as_they_are_told_to() -> None:
    driver, _ = open_fake(per_step_s=0.02, per_prefill_token_s=0.002)
    started = time.monotonic()
    driver.generate([driver.add(PROMPTS[1])], 3)
    assert time.monotonic() - started >= 3 * 0.02 + 20 * 0.002


def test_logprobs_are_given_when_asked_for() -> None:
    driver, _ = open_fake()
    result = driver.step([(driver.add(PROMPTS[1], SamplingParams(top_logprobs=2)), 20)])
    reported = result.logprobs[0]
    assert reported is not None
    assert reported.top[0][0] == result.tokens[0]
    assert len(reported.top) == 2


def test_tokens_stay_in_the_vocabulary_and_are_spread_over_it() -> None:
    tokens = np.array(fake_generate([1, 2, 3], 400, vocab_size=50))
    assert tokens.min() >= 0
    assert tokens.max() < 50
    assert len(set(tokens.tolist())) > 40
    assert fake_spec().dtype == torch.float32
