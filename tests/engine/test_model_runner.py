"""The transformers seam against transformers.generate, token by token, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import EngineError
from tests.engine.conftest import PROMPTS, TOKENS, Drawn
from tests.support.driver import Driver, open_runner
from tests.support.reference import reference_model
from tests.support.tiny_configs import FAMILIES, SIMILAR
from tests.support.tiny_models import make_tiny

PAGES = 420


def generated(
    path: Path, page_size: int, chunk: int, stagger: int, attention: str = "torch"
) -> list[list[int]]:
    runner, _ = open_runner(path, page_size, PAGES if page_size == 1 else 40, attention=attention)
    driver = Driver(runner, PAGES if page_size == 1 else 40, page_size, seed=page_size + chunk)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, TOKENS, chunk, stagger)
    runner.close()
    return [lane.outputs for lane in lanes]


@pytest.mark.covering
@pytest.mark.parametrize("family", sorted({**FAMILIES, **SIMILAR}))
@pytest.mark.parametrize(
    ("page_size", "chunk", "stagger"),
    [
        pytest.param(16, 1 << 20, 0, id="packed"),
        pytest.param(1, 13, 0, id="chunks-page1"),
        pytest.param(16, 7, 9, id="mixed"),
    ],
)
@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_greedy_tokens_equal_generate(
    family: str, page_size: int, chunk: int, stagger: int, attention: str, drawn: Drawn
) -> None:
    path, expected = drawn(family)
    assert generated(path, page_size, chunk, stagger, attention) == expected


@pytest.mark.parametrize("family", sorted({**FAMILIES, **SIMILAR}))
@torch.inference_mode()
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Greedy tokens do not tell: they stay the same if all logits are multiplied."""
    path = make_tiny(family, tmp_path, 0)
    runner, _ = open_runner(path, 16, 40)
    driver = Driver(runner, 40, 16)
    lane = driver.add(PROMPTS[1])
    logits = runner.logits(driver.batch([(lane, lane.prompt_len)]), np.arange(lane.prompt_len))
    runner.close()
    stock = reference_model(path, 0)
    torch.testing.assert_close(logits, stock(torch.tensor([lane.context])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_launching_ahead_with_unknown_tokens_changes_nothing(overlap: bool, drawn: Drawn) -> None:
    """Every decode step is launched before the result of the one before it is taken."""
    path, expected = drawn("qwen3")
    runner, _ = open_runner(path, 16, 40, overlap=overlap)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    pending = [runner.launch(driver.batch([(lane, lane.prompt_len) for lane in lanes]))]
    pending += [runner.launch(driver.batch([(lane, 1) for lane in lanes], unknown=True)) for _ in range(20)]
    tokens = np.stack([launched.result(60).tokens for launched in pending], axis=1)
    runner.close()
    assert tokens.tolist() == [answer[:21] for answer in expected]


def test_padding_rows_change_nothing_and_touch_only_page_0(drawn: Drawn) -> None:
    path, expected = drawn("llama")
    runner, pool = open_runner(path, 16, 40)
    driver = Driver(runner, 40, 16)
    lane, padding = driver.add(PROMPTS[1]), driver.add([0])
    padding.row, padding.pages = 0, [0]
    before = pool.data.clone()
    driver.step([(padding, 1), (lane, lane.prompt_len)])
    assert lane.outputs == expected[1][:1]
    changed = (pool.data != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted({0, *lane.pages})


def test_a_failed_forward_raises_from_its_result_and_the_next_one_runs(drawn: Drawn) -> None:
    path, expected = drawn("llama")
    runner, _ = open_runner(path, 16, 40, overlap=True)
    driver = Driver(runner, 40, 16)
    bad = driver.add([10_000])  # past the embedding
    failed = runner.launch(driver.batch([(bad, 1)]))
    with pytest.raises(EngineError, match="IndexError"):
        failed.result(60)
    lane = driver.add(PROMPTS[0])
    driver.generate([lane], 4)
    runner.close()
    assert lane.outputs == expected[0][:4]


def test_a_forward_launched_behind_a_failed_one_serves_its_other_rows(drawn: Drawn) -> None:
    path, expected = drawn("llama")
    runner, _ = open_runner(path, 16, 40, overlap=True)
    driver = Driver(runner, 40, 16)
    bad, lane = driver.add([10_000]), driver.add(PROMPTS[2])
    failed = runner.launch(driver.batch([(bad, 1)]))
    behind = runner.launch(driver.batch([(bad, 1), (lane, lane.prompt_len)], unknown=True))
    further = runner.launch(driver.batch([(bad, 1), (lane, 1)], unknown=True))
    with pytest.raises(EngineError, match="IndexError"):
        failed.result(60)
    tokens = [int(pending.result(60).tokens[1]) for pending in (behind, further)]
    runner.close()
    assert tokens == expected[2][:2]


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "torch"), ("bfloat16", "auto")])
def test_chunks_that_are_not_last_are_not_sampled(dtype: str, kind: str, drawn: Drawn) -> None:
    path, _ = drawn("llama")
    runner, _ = open_runner(path, 16, 40, dtype=dtype, attention=kind, linear=kind)
    driver = Driver(runner, 40, 16)
    result = driver.step([(driver.add(PROMPTS[1]), 8)])
    assert result.tokens.shape == (0,)
    assert result.logprobs == []
