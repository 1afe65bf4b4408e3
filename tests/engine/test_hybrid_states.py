"""State slots: what a forward may write, forks, and that the oracle sees every way of mixing states up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch, Pending
from engine.runner import ModelRunner
from kvcache.pool import MambaPool
from tests.support.driver import Driver, Lane, open_pools
from tests.support.reference import draw_model

HYBRID = (
    *(
        "bailing_hybrid",
        "falcon_h1",
        "glm5_next_text",
        "kimi_linear",
        "lfm2",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    ),
    "qwen3_next",
)
PAGE, PAGES, TOKENS, FORK = 16, 40, 32, 32
_random = random.Random(12)
PROMPT = [_random.randrange(256) for _ in range(72)]
COUSINS = [PROMPT[:FORK] + [_random.randrange(256) for _ in range(n)] for n in (1, 1, 2, 40)]
"""They part from PROMPT at a page border, and go on for one token or more."""

Drawn = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """family -> (directory, greedy answers to PROMPT and to each of COUSINS)."""
    directory = tmp_path_factory.mktemp("hybrid")
    return cache(lambda family: draw_model(family, directory, 0, [PROMPT, *COUSINS], TOKENS))


def slot_bytes(pool: MambaPool, slot: int) -> torch.Tensor:
    return pool.bytes[slot].clone()


def save_at(driver: Driver, lane: Lane, length: int) -> int:
    """Prefill the first `length` tokens, and leave the state there to whoever wants it."""
    driver.step([(lane, length - lane.done)])
    saved, lane.next_slot = lane.state_slot, 0
    return saved


def fork(driver: Driver, prompt: list[int], of: Lane, at: int, state: int) -> Lane:
    """A lane that begins with the pages of another and with the state saved there."""
    lane = driver.add(prompt)
    lane.pages, lane.done, lane.state_slot = of.pages[: at // PAGE], at, state
    return lane


@pytest.mark.covering
@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("chunk", [1 << 20, 1, 3])
def test_forks_read_one_saved_state_and_leave_it_alone(family: str, chunk: int, drawn: Drawn) -> None:
    """All four forks read the slot in one forward, in which the one they part from goes on from it too."""
    path, expected = drawn(family)
    runner, pools = open_pools(path, PAGE, PAGES, attention="auto")
    driver = Driver(runner, PAGES, PAGE)
    lane = driver.add(PROMPT)
    saved = save_at(driver, lane, FORK)
    before = slot_bytes(pools["state"], saved)
    lanes = [lane, *(fork(driver, prompt, lane, FORK, saved) for prompt in COUSINS)]
    driver.generate(lanes, TOKENS, chunk)
    runner.close()
    assert [lane.outputs for lane in lanes] == expected
    assert slot_bytes(pools["state"], saved).equal(before)


@pytest.mark.parametrize("family", HYBRID)
def test_a_forward_writes_its_slots_and_no_other(family: str, drawn: Drawn) -> None:
    path, expected = drawn(family)
    runner, pools = open_pools(path, PAGE, PAGES)
    driver = Driver(runner, PAGES, PAGE)
    lane, padding = driver.add(PROMPT), driver.add([0])
    padding.row, padding.pages = 0, [0]
    pair = [driver._free_states.pop() for _ in range(2)]
    others = [slot for slot in range(1, pools["state"].num_pages + 1) if slot not in pair]
    untouched = pools["state"].bytes[others].clone()
    for step in range(TOKENS + 2):  # three chunks, then decode, from one slot of a pair into the other
        before = slot_bytes(pools["state"], lane.state_slot)
        read, lane.next_slot = lane.state_slot, pair[step % 2]
        padding.done = padding.state_slot = padding.next_slot = 0
        driver.step([(lane, min(30, len(lane.context) - lane.done)), (padding, 1)])
        if read:
            assert slot_bytes(pools["state"], read).equal(before)
    runner.close()
    assert lane.outputs == expected[0]
    assert pools["state"].bytes[others].equal(untouched)


@pytest.mark.parametrize("family", HYBRID)
def test_prompts_of_one_token_may_come_before_a_decode_row(family: str, drawn: Drawn) -> None:
    path, expected = drawn(family)
    runner, _ = open_pools(path, PAGE, PAGES)
    driver = Driver(runner, PAGES, PAGE)
    lane = driver.add(PROMPT)
    driver.step([(lane, len(PROMPT))])
    for _ in range(3):
        driver.step([(driver.add(PROMPT[:1]), 1), (lane, 1)])
    runner.close()
    assert lane.outputs == expected[0][:4]


Spoil = Callable[[ForwardBatch, "Spoilt"], ForwardBatch]


@dataclass
class Spoilt:
    """An engine whose states are spoilt from the forward on in which row 0 comes to `when` tokens."""

    runner: ModelRunner
    pool: MambaPool
    spoil: Spoil
    when: int
    earlier: list[torch.Tensor] = field(default_factory=list)  # the pool before each forward

    def __post_init__(self) -> None:
        self.spec = self.runner.spec

    def launch(self, batch: ForwardBatch) -> Pending:
        self.earlier.append(self.pool.bytes.clone())
        return self.runner.launch(self.spoil(batch, self) if batch.seq_lens[0] >= self.when else batch)

    def close(self) -> None:
        self.runner.close()


def nothing(batch: ForwardBatch, _engine: Spoilt) -> ForwardBatch:
    return batch


def stale(batch: ForwardBatch, engine: Spoilt) -> ForwardBatch:
    """The state is that of one forward earlier: in decode one token, in prefill one chunk late."""
    slot = int(batch.state.reads[0])
    engine.pool.bytes[slot] = engine.earlier[-2][slot]
    return batch


def dropped(batch: ForwardBatch, _engine: Spoilt) -> ForwardBatch:
    return replace(batch, state=replace(batch.state, reads=np.zeros_like(batch.state.reads)))


def swapped(batch: ForwardBatch, _engine: Spoilt) -> ForwardBatch:
    return replace(batch, state=replace(batch.state, reads=batch.state.reads[::-1].copy()))


def lost(batch: ForwardBatch, _engine: Spoilt) -> ForwardBatch:
    """The new state goes to the scratch slot."""
    return replace(batch, state=replace(batch.state, writes=np.zeros_like(batch.state.writes)))


def other_layer(name: str) -> Spoil:
    def spoil(batch: ForwardBatch, engine: Spoilt) -> ForwardBatch:
        layers = [t.layer for t in engine.pool.spec.tensors if t.name == name]
        if layers:
            first, other = (engine.pool.tensor(layer, name)[batch.state.reads] for layer in layers[:2])
            engine.pool.tensor(layers[0], name)[batch.state.reads] = other
            engine.pool.tensor(layers[1], name)[batch.state.reads] = first
        return batch

    return spoil


def run_spoilt(path: Path, spoil: Spoil, when: int) -> list[list[int]]:
    """PROMPT and the longest cousin side by side in chunks of 24, then decode; spoilt from `when` on."""
    runner, pools = open_pools(path, PAGE, PAGES, attention="auto")
    driver = Driver(Spoilt(runner, pools["state"], spoil, when), PAGES, PAGE)
    lanes = [driver.add(PROMPT), driver.add(COUSINS[-1])]
    driver.generate(lanes, TOKENS, 24)
    runner.close()
    return [lane.outputs for lane in lanes]


@pytest.mark.covering
@pytest.mark.oracle
@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("when", [len(PROMPT), len(PROMPT) + 4], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(nothing, id="nothing"),
        pytest.param(stale, id="stale"),
        pytest.param(dropped, id="dropped"),
        pytest.param(swapped, id="swapped"),
        pytest.param(lost, id="lost"),
        pytest.param(other_layer("conv"), id="conv_of_another_layer"),
        pytest.param(other_layer("recurrent"), id="recurrent_of_another_layer"),
    ],
)
def test_oracle_sees(family: str, when: int, spoil: Any, drawn: Drawn, request: Any) -> None:
    path, expected = drawn(family)
    harmless = spoil is nothing or (family == "lfm2" and "recurrent" in request.node.callspec.id)
    assert (run_spoilt(path, spoil, when)[0] == expected[0]) == harmless
