"""A mixture of experts reads the experts that its tokens chose, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.runner import ModelRunner
from tests.support.cpu_kernels import packing_isas
from tests.support.driver import Driver, open_pools
from tests.support.tiny_models import make_tiny

IDS = [17, 200]
PAGE, PAGES = 4, 8


def note_chosen(runner: ModelRunner) -> dict[str, set[int]]:
    """Fills, from now on, with the experts that tokens chose, by the name of their module in the decoder."""
    chosen: dict[str, set[int]] = {}

    def noting(name: str) -> Callable[[Any, Any], None]:
        return lambda _module, inputs: chosen.setdefault(name, set()).update(inputs[1].flatten().tolist())

    for name, module in runner.forward.decoder.named_modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(noting(name))
    return chosen


def logits_of(runner: ModelRunner, chunk: int) -> torch.Tensor:
    """After each of IDS, float32 [2, vocab]."""
    driver = Driver(runner, PAGES, PAGE)
    lane = driver.add(IDS)
    rows = []
    with torch.inference_mode():
        while lane.done < len(IDS):
            count = min(chunk, len(IDS) - lane.done)
            rows.append(runner.logits(driver.batch([(lane, count)]), np.arange(count)).float())
    return torch.cat(rows)


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        *("qwen3_next", "qwen3_5_moe_text"),
    ],
)
def test_experts_that_no_token_chose_are_not_read(
    family: str, dtype: str, chunk: int, tmp_path: Path
) -> None:
    """Their weights and biases become NaN, and not one bit of the logits changes."""
    path = make_tiny(family, tmp_path, 0)
    runner, _ = open_pools(path, PAGE, PAGES, dtype=dtype)
    chosen = note_chosen(runner)
    before = logits_of(runner, chunk)
    assert chosen
    spared = 0
    for name, hit in list(chosen.items()):
        for parameter in runner.forward.decoder.get_submodule(name).parameters():
            idle = sorted(set(range(len(parameter))) - hit)
            parameter[idle] = torch.nan
            spared += len(idle)
    assert spared
    assert logits_of(runner, chunk).equal(before)
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            theirs = model(torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(before, theirs, rtol=1e-4, atol=1e-4)


def test_packed_experts_that_no_token_chose_are_not_read(tmp_path: Path) -> None:
    """Spoilt in the checkpoint, for a pack does not show its weights."""
    packing_isas()  # skipped without any
    path = make_tiny("gpt_oss", tmp_path, 0)
    runner, _ = open_pools(path, PAGE, PAGES, "bfloat16", linear="packed")
    chosen = note_chosen(runner)
    before = logits_of(runner, 1)
    weights, spared = load_file(path / "model.safetensors"), 0
    for name, weight in weights.items():
        for module, hit in chosen.items():
            if name.startswith(f"model.{module}."):
                idle = sorted(set(range(len(weight))) - hit)
                weight[idle] = torch.nan
                spared += len(idle)
    assert spared
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    runner, _ = open_pools(path, PAGE, PAGES, "bfloat16", linear="packed")
    kinds = {type(runner.forward.decoder.get_submodule(module)).__name__ for module in chosen}
    assert kinds == {"PackedExperts"}
    assert logits_of(runner, 1).equal(before)
