"""The oracle of windowed families can fail: each way of getting a window or a sink wrong shows in tokens.

What a spoilt run must look like differs from full attention (test_oracle_mutations.py): a page behind the
window may be anything, so what is spoilt is a page inside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.choose import build_attention
from engine.batch import ForwardBatch, Pending, WindowPages
from engine.config import EngineConfig
from engine.paged_layers import AttentionBackend, PagedLayers
from engine.runner import ModelRunner
from tests.support.driver import Driver, open_pools
from tests.support.reference import draw_model
from tests.support.tiny_configs import WINDOW

FAMILIES = ("mistral_window", "gemma3_text", "gpt_oss")
PAGE, PAGES, TOKENS = 8, 40, 32
_random = random.Random(12)
PROMPTS = [[_random.randrange(256) for _ in range(n)] for n in (72, 61)]

Spoil = Callable[[ForwardBatch, Any], ForwardBatch]


def with_pages(batch: ForwardBatch, change: Callable[[np.ndarray, int, int], None]) -> ForwardBatch:
    """The batch after `change(table, first, last)`: what the first sequence's query sees of its row 0."""
    assert batch.window is not None
    table, length = batch.window.page_table.copy(), int(batch.seq_lens[0])
    change(table, (length - WINDOW) // PAGE, (length - 1) // PAGE)
    return replace(batch, window=WindowPages(table, batch.window.out_slots))


def nothing(batch: ForwardBatch, _pool: Any) -> ForwardBatch:
    return batch


def another_lanes_page(batch: ForwardBatch, _pool: Any) -> ForwardBatch:
    def change(table: np.ndarray, first: int, _last: int) -> None:
        table[0, first + 1] = table[1, (int(batch.seq_lens[1]) - WINDOW) // PAGE + 1]

    return with_pages(batch, change)


def page_let_go_too_soon(batch: ForwardBatch, _pool: Any) -> ForwardBatch:
    def change(table: np.ndarray, first: int, _last: int) -> None:
        table[0, first] = 0

    return with_pages(batch, change)


def pages_in_another_order(batch: ForwardBatch, _pool: Any) -> ForwardBatch:
    """Whoever sees both pages whole does not notice; a window begins and a context ends inside a page."""

    def change(table: np.ndarray, first: int, last: int) -> None:
        table[0, [first, last]] = table[0, [last, first]]

    return with_pages(batch, change)


def stale_page(batch: ForwardBatch, _pool: Any) -> ForwardBatch:
    """Two tokens of the first sequence are written to page 0: their own page keeps what was there before."""
    assert batch.window is not None
    if len(PROMPTS[0]) + 2 <= int(batch.seq_lens[0]) < len(PROMPTS[0]) + 4:
        slots = batch.window.out_slots.copy()
        slots[0] = 0
        return replace(batch, window=WindowPages(batch.window.page_table, slots))
    return batch


def page_that_did_not_arrive(batch: ForwardBatch, pool: Any) -> ForwardBatch:
    """What a hand-off does that leaves one page of the window behind."""
    assert batch.window is not None
    if int(batch.seq_lens[0]) == len(PROMPTS[0]) + 1:
        pool.data[int(batch.window.page_table[0, (len(PROMPTS[0]) - 1) // PAGE])] = 0
    return batch


@dataclass
class Spoilt:
    """An engine whose decode steps are spoilt."""

    runner: ModelRunner
    pool: Any
    spoil: Spoil

    def __post_init__(self) -> None:
        self.spec = self.runner.spec

    def launch(self, batch: ForwardBatch) -> Pending:
        decodes = len(batch.q_lens) > 1 and (batch.q_lens == 1).all()
        return self.runner.launch(self.spoil(batch, self.pool) if decodes else batch)

    def close(self) -> None:
        self.runner.close()


class NoSinks:
    """A backend that forgets the sinks."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.prepare = backend.prepare
        self._forward = backend.forward

    def forward(
        self, place: int, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert sinks is not None
        self._forward(place, q, k_new, v_new, out)


Drawn = tuple[str, Path, list[list[int]]]


@pytest.fixture(scope="module", params=FAMILIES)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    path, answers = draw_model(request.param, tmp_path_factory.mktemp("oracle"), 0, PROMPTS, TOKENS)
    return request.param, path, answers


def run(driver: Driver) -> list[list[int]]:
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, TOKENS, chunk=40)
    return [lane.outputs for lane in lanes]


@pytest.mark.covering
@pytest.mark.oracle
@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        pytest.param(nothing, True, id="nothing"),
        pytest.param(another_lanes_page, False, id="another_lanes_page"),
        pytest.param(page_let_go_too_soon, False, id="page_let_go_too_soon"),
        pytest.param(pages_in_another_order, False, id="pages_in_another_order"),
        pytest.param(stale_page, False, id="stale_page"),
        pytest.param(page_that_did_not_arrive, False, id="page_that_did_not_arrive"),
    ],
)
def test_oracle_sees_a_wrong_window_page(spoil: Spoil, right: bool, drawn: Drawn) -> None:
    """Two sequences; only the first one's window is spoilt, so only its answer may differ."""
    _, path, answers = drawn
    runner, pools = open_pools(path, PAGE, PAGES, attention="auto")
    driver = Driver(Spoilt(runner, pools["window"], spoil), PAGES, PAGE)
    first, second = run(driver)
    assert (first == answers[0]) == right
    assert second == answers[1]


@pytest.mark.covering
@pytest.mark.oracle
@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("wider", [-1, 1])
def test_oracle_sees_a_window_off_by_one(wider: int, attention: str, drawn: Drawn) -> None:
    family, path, answers = drawn
    runner, pools = open_pools(path, PAGE, PAGES, attention=attention)
    pool = pools["window"]
    pool.spec = replace(pool.spec, window=WINDOW + wider)
    scale = 24**-0.5 if family == "gemma3_text" else 16**-0.5
    backend = build_attention(EngineConfig("m", attention=attention), pool, 4, scale, family == "gpt_oss")
    runner.forward.attention = PagedLayers(runner.attention.full, backend, runner.spec.groups)
    driver = Driver(runner, PAGES, PAGE)
    driver.window = WINDOW + 1  # every page that a wider window sees is held
    assert all(ours != theirs for ours, theirs in zip(run(driver), answers, strict=True))


@pytest.mark.oracle
@pytest.mark.parametrize("drawn", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "window"])
def test_oracle_sees_missing_sinks(kind: str, drawn: Drawn) -> None:
    _, path, answers = drawn
    runner, _ = open_pools(path, PAGE, PAGES, attention="auto")
    backends = {"full": runner.attention.full, "window": runner.attention.window}
    spoilt = backends[kind]
    assert spoilt is not None
    backends[kind] = NoSinks(spoilt)
    runner.forward.attention = PagedLayers(backends["full"], backends["window"], runner.spec.groups)
    assert all(ours != theirs for ours, theirs in zip(run(Driver(runner, PAGES, PAGE)), answers, strict=True))
