"""What holds of every model over pages of latents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import PROMPTS, TOKENS
from tests.support.driver import Driver, open_runner

Answered = tuple[Path, list[list[int]]]
"""A model, and TOKENS greedy tokens of transformers after each of PROMPTS."""

ways_to_pack = pytest.mark.parametrize(
    ("page_size", "chunk", "stagger"),
    [
        pytest.param(1, 13, 0, id="chunks-page1"),
        pytest.param(16, 1 << 20, 0, id="packed"),
        pytest.param(16, 7, 9, id="mixed"),
        pytest.param(64, 11, 5, id="mixed-page64"),
    ],
)


def check_greedy(answered: Answered, attention: str, page_size: int, chunk: int, stagger: int) -> None:
    path, expected = answered
    pages = 420 if page_size == 1 else 40
    runner, _ = open_runner(path, page_size, pages, attention=attention)
    driver = Driver(runner, pages, page_size, seed=page_size + chunk)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, TOKENS, chunk, stagger)
    assert [lane.outputs for lane in lanes] == expected


def check_pages_elsewhere(answered: Answered, prompt: int) -> None:
    """Prefilled here, decoded there, from the bytes of the prompt's pages at other places."""
    path, expected = answered
    (here, sent), (there, received) = (open_runner(path, 16, 12, attention="auto") for _ in range(2))
    prefilling = Driver(here, 12, 16)
    lane = prefilling.add(PROMPTS[prompt])
    prefilling.generate([lane], 1, chunk=20)
    places = list(range(1, len(lane.pages) + 1))
    assert places != lane.pages
    received.bytes[places] = sent.bytes[lane.pages]
    lane.pages = places
    decoding = Driver(there, 12, 16)
    decoding._free = [page for page in decoding._free if page not in places]
    decoding.generate([lane], 40)
    assert lane.outputs == expected[prompt][:40]
