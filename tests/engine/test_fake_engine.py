"""The fake engine is deterministic, and any wrong page shows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.fake import FakeEngine, FakeTiming, fake_generate, fake_spec
from kvcache.pool import MHAKVCache
from tests.support.driver import Driver, Lane
from wire.messages import SamplingParams

_random = random.Random(3)
PROMPTS = [[_random.randrange(32768) for _ in range(n)] for n in (1, 20, 47)]
PAGES = 60


def open_fake(page_size: int = 4, overlap: bool = False, **timing: float) -> tuple[Driver, MHAKVCache]:
    spec = fake_spec()
    pool = MHAKVCache(spec.groups[0], PAGES, page_size)
    engine = FakeEngine(spec, pool, FakeTiming(**timing), overlap)
    return Driver(engine, PAGES, page_size), pool


@pytest.mark.parametrize(("chunk", "stagger"), [(1 << 20, 0), (7, 0), (3, 5)])
@pytest.mark.parametrize("overlap", [False, True])
def test_output_equals_the_oracle(chunk: int, stagger: int, overlap: bool) -> None:
    driver, _ = open_fake(overlap=overlap)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, 16, chunk, stagger)
    driver.engine.close()
    assert [lane.outputs for lane in lanes] == [fake_generate(prompt, 16) for prompt in PROMPTS]


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


def lose(pool: MHAKVCache, lane: Lane, other: Lane) -> None:
    pool.data[lane.pages[2]] = 0


def go_stale(pool: MHAKVCache, lane: Lane, other: Lane) -> None:
    pool.data[lane.pages[2]] = pool.data[other.pages[2]]


def swap(pool: MHAKVCache, lane: Lane, other: Lane) -> None:
    lane.pages[1], lane.pages[2] = lane.pages[2], lane.pages[1]


@pytest.mark.parametrize("damage", [lose, go_stale, swap])
def test_a_damaged_page_changes_the_output(damage: Callable[[MHAKVCache, Lane, Lane], None]) -> None:
    driver, pool = open_fake()
    lane, other = driver.add(PROMPTS[1]), driver.add(PROMPTS[2])
    driver.generate([lane, other], 2)
    damage(pool, lane, other)
    driver.generate([lane, other], 6)
    assert lane.outputs[:2] == fake_generate(PROMPTS[1], 2)
    assert lane.outputs[2] != fake_generate(PROMPTS[1], 3)[2]
    assert other.outputs == fake_generate(PROMPTS[2], 6)


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
