"""A mixture of experts reads the experts that its tokens chose, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.runner import ModelRunner
from tests.support.driver import Driver, open_pools
from tests.support.tiny_models import make_tiny

IDS = [17, 200]
PAGE, PAGES = 4, 8


def experts_of(model: Any) -> list[torch.nn.Module]:
    """Of every layer that has them."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


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


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next"])
def test_experts_that_no_token_chose_are_not_read(
    family: str, dtype: str, chunk: int, tmp_path: Path
) -> None:
    """Their weights and biases become NaN, and not one bit of the logits changes."""
    path = make_tiny(family, tmp_path, 0)
    runner, _ = open_pools(path, PAGE, PAGES, dtype=dtype)
    chosen: list[tuple[torch.nn.Module, set[int]]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, inputs: chosen.append((module, set(inputs[1].flatten().tolist())))
        )
        for module in experts_of(runner._decoder)
    ]
    assert hooks
    before = logits_of(runner, chunk)
    for hook in hooks:
        hook.remove()
    spared = 0
    for module in {id(module): module for module, _ in chosen}.values():
        hit = set.union(*(experts for of, experts in chosen if of is module))
        for parameter in module.parameters():
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
