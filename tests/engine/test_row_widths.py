"""Rows of keys and values in pages that are wider than the model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.row_widths import fitted
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, open_runner

PAGE, PAGES = 4, 128


@pytest.mark.parametrize(
    ("dim", "dtype", "expected"),
    [
        (64, torch.bfloat16, 64),
        (80, torch.bfloat16, 128),
        (96, torch.float16, 128),
        (192, torch.bfloat16, 256),
        (96, torch.float32, 96),
        (32, torch.bfloat16, 32),  # twice as wide
        (640, torch.bfloat16, 640),
    ],
)
def test_rows_on_a_gpu_are_as_wide_as_its_kernels_read(dim: int, dtype: torch.dtype, expected: int) -> None:
    keys = KVGroupSpec((0,), 2, dim, dtype)
    latents = LatentGroupSpec((1,), 96, 16, dtype)
    gpu = EngineConfig("m", device="cuda:1")
    assert fitted((keys, latents), gpu) == (replace(keys, head_dim=expected), latents)
    assert fitted((keys,), replace(gpu, attention="torch")) == (keys,)
    assert fitted((keys,), EngineConfig("m")) == (keys,)


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma4_text", "mimo_v2_flash"])
def test_wider_rows_change_no_token(
    family: str, attention: str, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wider(groups: tuple[GroupSpec, ...], _: EngineConfig) -> tuple[GroupSpec, ...]:
        return tuple(
            replace(one, head_dim=one.head_dim + 32) if isinstance(one, KVGroupSpec) else one
            for one in groups
        )

    path, expected = drawn(family)
    monkeypatch.setattr("engine.loader.fitted", wider)
    runner, _ = open_runner(path, PAGE, PAGES, "float32", attention, "auto")
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, len(expected[0]), chunk=7, stagger=9)
    assert [lane.outputs for lane in lanes] == expected
