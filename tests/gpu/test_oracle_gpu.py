"""The oracle on a GPU: float32 token by token; bfloat16, graphs too, within transformers' own rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.graphs import DecodeLimits
from engine.runner import ModelRunner
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.test_oracle_bfloat16 import LAW
from tests.support.driver import Driver, open_pools
from tests.support.oracle import EVERY, SIMILAR
from tests.support.wide_models import WIDE, make_wide

PAGE, PAGES = 16, 40
LIMITS = DecodeLimits(sequences=4, context_pages=10, rows=8)
OUTPUTS = 24


@pytest.mark.parametrize("family", [*EVERY, *SIMILAR])
def test_float32_tokens_equal_generate(family: str, drawn: Drawn, device: str) -> None:
    path, expected = drawn(family)
    runner, _ = open_pools(path, PAGE, PAGES, attention="auto", device=device)
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, OUTPUTS, chunk=7, stagger=3)
    runner.close()
    assert [lane.outputs for lane in lanes] == [answer[:OUTPUTS] for answer in expected]


@torch.inference_mode()
def logits_of(path: Path, ids: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """transformers' logits, float32 [len(ids), vocab]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    logits: torch.Tensor = model(torch.tensor([list(ids)], device=device)).logits[0].float()
    return logits


def open_flashinfer(path: Path, device: str, overlap: bool = False) -> ModelRunner:
    """A runner none of whose attention is plain torch."""
    runner, _ = open_pools(path, PAGE, PAGES, "bfloat16", "flashinfer", "auto", overlap, device)
    plain = {"TorchAttention", "TorchLatentAttention", "TorchSparseAttention", "TorchCompressedAttention"}
    assert plain.isdisjoint(runner.attention.backend_names)
    return runner


@pytest.mark.parametrize("family", WIDE)
def test_bfloat16_is_within_transformers_own_rounding(family: str, device: str, tmp_path: Path) -> None:
    path, ids = make_wide(family, tmp_path, 3), np.random.default_rng(0).integers(0, 256, 600).tolist()
    exact, rounded = (logits_of(path, ids, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    runner = open_flashinfer(path, device)
    driver = Driver(runner, PAGES, PAGE)
    lane = driver.add(ids)
    with torch.inference_mode():
        chunks = [runner.logits(driver.batch([(lane, n)]), np.arange(n)) for n in (256, 1, 87, 1, 255)]
    runner.close()
    ours, theirs = (torch.cat(chunks).float() - exact).abs(), (rounded - exact).abs()
    assert ours.max() <= LAW * theirs.max()
    assert ours.mean() <= LAW * theirs.mean()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", WIDE)
def test_graphs_contradict_float32_only_within_rounding(
    family: str, overlap: bool, device: str, tmp_path: Path
) -> None:
    """Chunks beside decode rows first, then decode steps, which are replays, launched one ahead if there is
    overlap. Each token is the best one of transformers' float32, or as good as its bfloat16 can tell."""
    path = make_wide(family, tmp_path, 3)
    runner = open_flashinfer(path, device, overlap)
    runner.record_decode(LIMITS)
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    pending = [runner.launch(driver.batch([(lane, lane.prompt_len) for lane in lanes]))]
    for _ in range(OUTPUTS):
        pending.append(runner.launch(driver.batch([(lane, 1) for lane in lanes], unknown=True)))
    tokens = np.stack([launched.result(120).tokens for launched in pending], axis=1).tolist()
    runner.close()
    for prompt, outputs in zip(PROMPTS, tokens, strict=True):
        ids, begin = [*prompt, *outputs[:-1]], len(prompt) - 1
        exact, rounded = (logits_of(path, ids, dtype, device) for dtype in (torch.float32, torch.bfloat16))
        steps = exact[begin:]
        chosen = steps.gather(1, torch.tensor(outputs, device=device)[:, None])[:, 0]
        error = (rounded - exact).abs().max()
        assert (steps.max(-1).values - chosen).max() <= 2 * LAW * error
