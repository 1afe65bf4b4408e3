"""Random shapes of every family, colocated and with prefill and decode apart, against transformers.generate.

`make fuzz-models` draws MODELS of them from SEED on (400 from 0), `make oracle` one of each family. A failure
names its seed; `make fuzz-models SEED=that MODELS=1` repeats it alone.

In float32 the order of a sum may decide between tokens that are all but equal. Such a near-tie is no
difference: after the tokens that we have, transformers itself must

- find our token within MIN_MARGIN of the best one (tests/support/reference.py), or
- choose our token once its embeddings are changed by a millionth, as a sum in another order changes them.
  This covers routers of experts: there a near-tie changes the logits by more than any margin.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.gate import FAMILIES
from tests.support.hand_off import Pair, pair
from tests.support.random_models import EVERY_SHAPE, family_of, random_config, random_options, random_prompts
from tests.support.reference import reference_generate, reference_greedy, reference_model
from tests.support.tiny_models import write_tiny

FIRST = int(os.environ.get("FUZZ_SEED", "0"))
COUNT = int(os.environ.get("FUZZ_MODELS", len(EVERY_SHAPE)))
OUTPUT_TOKENS = 24
_CHANGES = 8
_CHANGE = 1e-6  # relative; float32 rounds to 6e-8, and a sum of a hundred terms loses ten times that


@torch.inference_mode()
def chosen_after_a_change(path: Path, ids: Sequence[int]) -> set[int]:
    """The tokens that transformers chooses after `ids` when its embeddings are changed by a millionth."""
    model = reference_model(path, (path / "model.safetensors").stat().st_mtime_ns)
    embedded = model.get_input_embeddings()(torch.tensor([list(ids)]))
    chosen = set()
    for seed in range(_CHANGES):
        noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed))
        logits = model(inputs_embeds=embedded * (1 + _CHANGE * noise), use_cache=False).logits
        chosen.add(int(logits[0, -1].argmax()))
    return chosen


def is_near_tie(path: Path, prompt: Sequence[int], ours: Sequence[int]) -> bool:
    """Whether every token of ours is the reference's, or all but as good, after those before it."""
    context = [*prompt, *ours]
    within = reference_greedy(path, context[:-1])[len(prompt) - 1 :]
    return all(
        token in allowed or token in chosen_after_a_change(path, context[: len(prompt) + i])
        for i, (token, allowed) in enumerate(zip(ours, within, strict=True))
    )


def answers(both: Pair, first_room: int, prompts: list[list[int]], split: bool) -> list[list[int]]:
    """All prompts at once."""
    rooms = range(first_room, first_room + len(prompts))
    for room, prompt in zip(rooms, prompts, strict=True):
        both.ask(room, prompt, OUTPUT_TOKENS, split)
    both.run_dry()
    for room in rooms:
        assert both.outputs[room].finish is not None, both.outputs[room].rejected
    return [both.outputs[room].tokens for room in rooms]


def test_every_family_is_drawn() -> None:
    assert set(EVERY_SHAPE) == set(FAMILIES)


@pytest.mark.oracle_full
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT), ids=lambda seed: f"{family_of(seed)}-{seed}")
def test_a_random_model(seed: int, tmp_path: Path, record_property: Any) -> None:
    config, options, prompts = random_config(seed), random_options(seed), random_prompts(seed)
    path = tmp_path / "model"
    write_tiny(config, path, seed)
    expected = [reference_generate(path, prompt, OUTPUT_TOKENS)[0] for prompt in prompts]
    with pair(**{**options, "model": str(path)}) as both:
        ways = {
            "colocated": answers(both, 1, prompts, split=False),
            "apart, as far as decode lacks it": answers(both, 11, prompts, split=True),
        }
        both.settle(60.0)
    with pair(**{**options, "model": str(path)}) as both:
        ways["apart"] = answers(both, 1, prompts, split=True)
        ways["apart, and cached"] = answers(both, 11, prompts, split=True)
        both.settle(60.0)
    for way, outputs in ways.items():
        for prompt, ours, theirs in zip(prompts, outputs, expected, strict=True):
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                where = f"SEED={seed}, {way}: token {at} of {len(prompt)} + {OUTPUT_TOKENS}"
                assert is_near_tie(path, prompt, ours), f"{where} differs; {config} {options}"
                record_property("near tie", where)
                print(f"near tie: {where}")  # noqa: T201
