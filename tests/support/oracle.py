"""What the oracle tests share: families, and few stacks that meet many combinations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product

import pytest

from tests.support import tiny_configs

DENSE = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3", "qwen2_moe")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
INDEXED = ("minimax_m3_vl_text",)
"""Families whose pages have index keys beside keys and values."""
WINDOWED = (
    *("mistral_window", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "llama4_text", "deepseek_v4"),
)
HYBRID = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bailing_hybrid", "falcon_h1", "glm5_next_text"),
    *("kimi_linear", "lfm2", "lfm3"),
)
"""Families with a state group."""
EVERY = (*DENSE, *LATENT, *INDEXED, *WINDOWED, *HYBRID)
SIMILAR = tuple(sorted({**tiny_configs.SIMILAR, "seed_oss": None}))
"""Families whose memory and attention are those of one in EVERY."""
STATEFUL = (*HYBRID, "bamba", "granitemoehybrid", "lfm2_moe", "nemotron_h", "olmo_hybrid")
"""Families of EVERY and of SIMILAR with a state group."""

Pair = tuple[tuple[int, object], tuple[int, object]]


def pairs_of(row: Sequence[object]) -> set[Pair]:
    """Every two values of a row, each with the number of its axis."""
    return set(combinations(enumerate(row), 2))


def covering(axes: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Rows with one value of each axis in which every two values of different axes meet: far fewer than the
    product has. Always the same ones."""
    rng = random.Random(1)
    missing: set[Pair] = set()
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        missing |= {((i, a), (j, b)) for a, b in product(first, second)}
    rows = []
    while missing:
        start = min(missing, key=repr)
        candidates = []
        for _ in range(60):
            row = [rng.choice(axis) for axis in axes]
            for i, value in start:
                row[i] = value
            candidates.append(tuple(row))
        rows.append(max(candidates, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


def pairwise(*axes: Sequence[object]) -> list[object]:
    """The product of the axes, for pytest.mark.parametrize. `make test` takes rows that are `covering`, and
    `make invariants` the others, too."""
    chosen = covering(axes)
    rows = []
    for row in product(*axes):
        names = ["+".join(value) if isinstance(value, tuple) else str(value) for value in row]
        marks = () if row in chosen else pytest.mark.invariants
        rows.append(pytest.param(*row, id="-".join(names), marks=marks))
    return rows


def seeds(count: int, more: int) -> list[object]:
    """For pytest.mark.parametrize: `make test` takes `count` seeds, and `make invariants` `more` of them."""
    return [*range(count), *(pytest.param(seed, marks=pytest.mark.invariants) for seed in range(count, more))]
