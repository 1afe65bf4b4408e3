"""Tiny models with clear greedy answers, drawn once per run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.reference import draw_model

_random = random.Random(7)
PROMPTS = [[_random.randrange(256) for _ in range(n)] for n in (5, 33, 64)]
TOKENS = 40  # of an answer: past the tiny models' windows, pages and kept states
Drawn = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """family -> (directory, TOKENS greedy tokens after each of PROMPTS)."""
    directory = tmp_path_factory.mktemp("tiny")
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def draw(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            made[family] = draw_model(family, directory, 0, PROMPTS, TOKENS)
        return made[family]

    return draw
