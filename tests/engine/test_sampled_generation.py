"""Sampled output of a real model does not depend on batch, chunking, overlap or a restart."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling_state import SamplingState
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, Lane, open_runner
from wire.request import SamplingParams

PARAMS = SamplingParams(
    temperature=0.8, top_k=60, top_p=0.95, seed=41, repetition_penalty=1.1, frequency_penalty=0.2
)


def alone(drawn: Drawn, choice: int = 0) -> list[int]:
    runner, _ = open_runner(drawn("qwen3")[0], 16, 40)
    driver = Driver(runner, 40, 16)
    lane = driver.add(PROMPTS[1], PARAMS, choice=choice)
    driver.generate([lane], 32)
    return lane.outputs


@pytest.mark.parametrize(("page_size", "chunk", "stagger"), [(16, 1 << 20, 0), (16, 5, 4), (1, 11, 2)])
def test_neighbours_pages_and_chunks_change_nothing(
    page_size: int, chunk: int, stagger: int, drawn: Drawn
) -> None:
    runner, _ = open_runner(drawn("qwen3")[0], page_size, 300, overlap=True)
    driver = Driver(runner, 300, page_size, seed=5)
    others = [driver.add(PROMPTS[0]), driver.add(PROMPTS[2], SamplingParams(seed=1))]
    lane = driver.add(PROMPTS[1], PARAMS)
    driver.generate([others[0], lane, others[1]], 32, chunk, stagger)
    runner.close()
    assert lane.outputs == alone(drawn)


def test_choices_differ(drawn: Drawn) -> None:
    assert alone(drawn, choice=1) != alone(drawn, choice=0)


@pytest.mark.parametrize("known", [1, 13, 31])
def test_a_restart_from_forced_tokens_goes_on_as_if_nothing_had_happened(known: int, drawn: Drawn) -> None:
    expected = alone(drawn)
    runner, _ = open_runner(drawn("qwen3")[0], 16, 40)
    state = SamplingState(PARAMS, np.asarray(PROMPTS[1], dtype=np.int32), (), 0, expected[:known])
    lane = Lane(1, PROMPTS[1] + expected[:known], len(PROMPTS[1]), state)
    Driver(runner, 40, 16).generate([lane], 32)
    assert lane.outputs == expected
