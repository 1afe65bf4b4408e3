"""Windowed families against transformers: tokens, the window's exact border, and what lies outside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.config import EngineConfig
from engine.loader import load_model
from engine.runner import ModelRunner
from kvcache.layout import KVGroupSpec
from tests.engine.conftest import PROMPTS, TOKENS, Drawn
from tests.support.driver import Driver, open_pools
from tests.support.reference import draw_model, reference_generate
from tests.support.tiny_models import write_tiny

PAGE = 8
PAGES = 60
WINDOW = 11
ONE_LAYER: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 258,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"]}
QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
BORDER: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral": lambda: MistralConfig(**ONE_LAYER, sliding_window=WINDOW),
    "mixtral": lambda: MixtralConfig(
        **ONE_LAYER, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi3": lambda: Phi3Config(
        **{k: v for k, v in ONE_LAYER.items() if k != "head_dim"}, sliding_window=WINDOW
    ),
    "gemma2": lambda: Gemma2Config(
        **ONE_LAYER,
        **SLIDING,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": lambda: Gemma3TextConfig(**ONE_LAYER, **SLIDING, query_pre_attn_scalar=20),
    "gpt_oss": lambda: GptOssConfig(**ONE_LAYER, **SLIDING, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in ONE_LAYER.items() if k != "head_dim"}, **QWEN),
    "qwen3": lambda: Qwen3Config(**ONE_LAYER, **QWEN),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{k: v for k, v in ONE_LAYER.items() if k != "head_dim"},
        **SLIDING,
        use_sliding_window=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **ONE_LAYER, **QWEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}
"""One sliding layer each, so that what a token sees is its window and nothing behind it."""


def last_logits(runner: ModelRunner, pools: dict[str, Any], ids: list[int], chunk: int) -> torch.Tensor:
    """Ours after `ids`, computed in chunks, every page spoilt that slid out of the window."""
    driver = Driver(runner, PAGES, PAGE, window_pool=pools["window"])
    lane = driver.add(ids)
    with torch.inference_mode():
        while lane.done < len(ids):
            count = min(chunk, len(ids) - lane.done)
            logits = runner.logits(driver.batch([(lane, count)]), np.asarray([count - 1]))
    return logits[0]


@pytest.mark.covering
@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("family", sorted(BORDER))
def test_the_windows_border_is_transformers(family: str, attention: str, tmp_path: Path) -> None:
    """A query at p sees p - window + 1 .. p: both sides of the border, in one forward and token by token."""
    write_tiny(BORDER[family](), tmp_path, 0)
    rng = random.Random(1)
    ids = [rng.randrange(256) for _ in range(40)]
    border = len(ids) - WINDOW  # the first position that the last token sees

    def but(changed: int) -> list[int]:
        return [*ids[:changed], (ids[changed] + 1) % 256, *ids[changed + 1 :]]

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = [model(torch.tensor([one])).logits[0, -1] for one in (ids, but(border - 1), but(border))]
    runner, pools = open_pools(tmp_path, PAGE, PAGES, attention=attention)
    for chunk in (len(ids), WINDOW + 1, PAGE, 1):
        ours = [last_logits(runner, pools, one, chunk) for one in (ids, but(border - 1), but(border))]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for same, unseen, seen in (ours, theirs):
            torch.testing.assert_close(unseen, same, rtol=1e-5, atol=1e-5)  # experts sum in another order
            assert (seen - same).abs().max() > 1e-2


@pytest.mark.covering
@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize(
    ("page_size", "chunk", "stagger"),
    [
        pytest.param(1, 25, 0, id="page1-window-and-one"),
        pytest.param(5, 24, 0, id="page5-window"),
        pytest.param(16, 11, 7, id="mixed"),
    ],
)
@pytest.mark.parametrize("family", ["mistral_window", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"])
def test_greedy_tokens_equal_generate_with_spoilt_pages_behind_the_window(
    family: str, page_size: int, chunk: int, stagger: int, attention: str, drawn: Drawn
) -> None:
    path, expected = drawn(family)
    pages = 448 // page_size
    runner, pools = open_pools(path, page_size, pages, attention=attention)
    driver = Driver(runner, pages, page_size, seed=chunk, window_pool=pools["window"])
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, TOKENS, chunk, stagger)
    assert [lane.outputs for lane in lanes] == expected
    assert all(not any(lane.window_pages[: (lane.done - 24) // page_size]) for lane in lanes)


def test_a_page_changes_hands_between_forwards_that_are_launched_ahead(drawn: Drawn) -> None:
    """All decode steps are launched at once: a page that slid out of one window is in another by the next."""
    path, expected = drawn("gpt_oss")
    runner, _ = open_pools(path, PAGE, PAGES, attention="auto", overlap=True)
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    pending = [runner.launch(driver.batch([(lane, lane.prompt_len) for lane in lanes]))]
    pending += [
        runner.launch(driver.batch([(lane, 1) for lane in lanes], unknown=True)) for _ in range(TOKENS - 1)
    ]
    tokens = np.stack([launched.result(60).tokens for launched in pending], axis=1)
    runner.close()
    assert tokens.tolist() == expected


def test_qwen2_slides_where_layer_types_says_so(tmp_path: Path) -> None:
    fields = {**ONE_LAYER, "num_hidden_layers": 4, "sliding_window": WINDOW, "use_sliding_window": True}
    del fields["head_dim"]
    write_tiny(Qwen2Config(**fields, max_window_layers=2), tmp_path, 3)
    prompt = PROMPTS[1]
    expected, margin = reference_generate(tmp_path, prompt, 32)
    assert margin > 1e-4
    runner, pools = open_pools(tmp_path, PAGE, PAGES, attention="auto")
    assert [(spec.name, spec.layer_ids) for spec in runner.spec.groups] == [
        ("full", (0, 1)),
        ("window", (2, 3)),
    ]
    driver = Driver(runner, PAGES, PAGE, window_pool=pools["window"])
    lane = driver.add(prompt)
    driver.generate([lane], 32, chunk=13)
    assert lane.outputs == expected


def test_a_model_of_sliding_layers_only_has_a_full_group_of_no_layers(tmp_path: Path) -> None:
    write_tiny(BORDER["mistral"](), tmp_path, 0)
    full, window = load_model(EngineConfig(str(tmp_path))).spec.groups
    assert isinstance(full, KVGroupSpec)
    assert isinstance(window, KVGroupSpec)
    assert (full.name, full.layer_ids, full.page_bytes(PAGE)) == ("full", (), 0)
    assert (window.name, window.layer_ids, window.window) == ("window", (0,), WINDOW)


def test_layers_may_differ_in_their_query_heads(tmp_path: Path) -> None:
    """Laguna's do by their kind. A backend that believed the config would read and write past its tensors."""
    prompt = list(range(70))
    path, (expected,) = draw_model("laguna", tmp_path, 0, [prompt], 16)
    runner, pools = open_pools(path, PAGE, PAGES, attention="auto")
    assert [layer.query_heads for layer in load_model(EngineConfig(str(path))).attention] == [4, 2, 4, 2]
    driver = Driver(runner, PAGES, PAGE, window_pool=pools["window"])
    lane = driver.add(prompt)
    driver.generate([lane], 16, chunk=13)
    runner.close()
    assert lane.outputs == expected
