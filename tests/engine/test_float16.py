"""float16 is served as transformers would compute it: our rounding is within theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.test_oracle_bfloat16 import LAW
from tests.support.driver import Driver, open_runner
from tests.support.tiny_models import make_tiny

IDS = np.random.default_rng(0).integers(0, 256, 96).tolist()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "deepseek_v32"])
def test_logits_in_float16_are_within_transformers_own_rounding(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, 3)
    with torch.inference_mode():
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(torch.tensor([IDS])).logits[0].float()
            for dtype in (torch.float32, torch.float16)
        )
        runner, _ = open_runner(path, 16, 8, "float16", "auto", "auto")
        driver = Driver(runner, 8, 16)
        lane = driver.add(IDS)
        chunks = [runner.logits(driver.batch([(lane, n)]), np.arange(n)).float() for n in (30, 1, 40, 25)]
    runner.close()
    ours, theirs = (torch.cat(chunks) - exact).abs(), (rounded - exact).abs()
    assert ours.max() <= LAW * theirs.max()
    assert ours.mean() <= LAW * theirs.mean()
