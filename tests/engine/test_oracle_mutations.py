"""The oracle can fail: each way of getting memory wrong turns its token comparison red.

A real model reads real pages while one thing is spoilt. Two subtleties of attention decide what a spoilt run
must look like: keys carry their own position, so a sum over WHOLE pages does not depend on their order, and
rotation is relative, so shifting every position alike is no error. Hence pages are swapped where it matters
(the last page of a context, which is read in part; and in a pool whose pages another request shares), and
positions are off by one from the first decode step on.

This is about the group that decides reuse, in every family that has one with layers. What spoils a window, a
state or a latent: test_windowed_mutations.py, test_hybrid_states.py, test_latent.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from engine.batch import ForwardBatch
from engine.errors import EngineError
from kvcache.pool import MHAKVCache, MLAKVCache
from tests.support.driver import Driver, open_runner
from tests.support.oracle import DENSE, EVERY, INDEXED, LATENT
from tests.support.reference import draw_model
from tests.support.spoilt import Spoilt, nothing

FAMILIES = tuple(family for family in EVERY if family != "mistral_window")
SHARING = (*DENSE, *LATENT, *INDEXED)
"""Families that need nothing but these pages to go on from a prefix."""
PAGE, PAGES, TOKENS = 16, 20, 32
_random = random.Random(11)
PROMPT = [_random.randrange(256) for _ in range(72)]
COUSIN = PROMPT[: 2 * PAGE] + [_random.randrange(256) for _ in range(21)]
"""Shares the first two pages of PROMPT."""

Pool = MHAKVCache | MLAKVCache
Spoil = Callable[[ForwardBatch, Pool], ForwardBatch]


def zeroed_page(batch: ForwardBatch, pool: Pool) -> ForwardBatch:
    pool.data[int(batch.page_table[0, 1])] = 0
    return batch


def swapped_page_table(batch: ForwardBatch, _pool: Pool) -> ForwardBatch:
    table, last = batch.page_table.copy(), (int(batch.seq_lens[0]) - 1) // PAGE
    table[0, [1, last]] = table[0, [last, 1]]
    return replace(batch, page_table=table)


def position_off_by_one(batch: ForwardBatch, _pool: Pool) -> ForwardBatch:
    return replace(batch, positions=batch.positions + 1)


def swapped_in_pool(batch: ForwardBatch, pool: Pool) -> ForwardBatch:
    """What a transfer does that mixes up its destinations. Whoever has both pages does not notice."""
    if int(batch.seq_lens[0]) == len(PROMPT) + 1:
        first, other = batch.page_table[0, [1, 3]].tolist()
        pool.bytes[[first, other]] = pool.bytes[[other, first]]
    return batch


Drawn = tuple[str, Path, list[list[int]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=pytest.mark.oracle_full if i % 2 else ())
        for i, family in enumerate(FAMILIES)
    ],
)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    path, answers = draw_model(request.param, tmp_path_factory.mktemp("oracle"), 0, [PROMPT, COUSIN], TOKENS)
    return request.param, path, answers


@pytest.mark.covering
@pytest.mark.oracle
@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        pytest.param(nothing, [True, True], id="nothing"),
        pytest.param(zeroed_page, [False, False], id="zeroed_page"),
        pytest.param(swapped_page_table, [False, False], id="swapped_page_table"),
        pytest.param(position_off_by_one, [False, False], id="position_off_by_one"),
        pytest.param(swapped_in_pool, [True, False], id="swapped_in_pool"),
    ],
)
def test_oracle_sees(spoil: Spoil, right: list[bool], drawn: Drawn) -> None:
    """PROMPT in two chunks, then COUSIN on its pages: which of the two answers are transformers'.

    COUSIN is left out where more than these pages is needed to go on from its prefix. Kimi Linear's layers
    know no positions.
    """
    family, path, answers = drawn
    if family == "kimi_linear" and spoil is position_off_by_one:
        right = [True]
    runner, pool = open_runner(path, PAGE, PAGES, attention="auto")
    driver = Driver(Spoilt(runner, pool, spoil), PAGES, PAGE)
    lane = driver.add(PROMPT)
    # DeepSeek-V4's entries end where positions say, which may be past a context.
    with suppress(EngineError) if family == "deepseek_v4" else nullcontext():
        driver.generate([lane], TOKENS, chunk=40)
    same = [lane.outputs == answers[0]]
    if family in SHARING:
        cousin = driver.add(COUSIN)
        cousin.pages, cousin.done = lane.pages[:2], 2 * PAGE
        driver.generate([cousin], TOKENS)
        same.append(cousin.outputs == answers[1])
    assert same == right[: len(same)]
