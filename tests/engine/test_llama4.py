"""Llama 4's parts against transformers': chunked attention, mixtures, and queries scaled by positions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from engine.config import EngineConfig
from engine.llama4 import Llama4Experts, Llama4Mixture
from engine.loader import load_model
from engine.runner import ModelRunner
from tests.support.cpu_kernels import packing_isas
from tests.support.driver import Driver, open_pools, open_runner
from tests.support.tiny_configs import CHUNK, COMMON
from tests.support.tiny_models import write_tiny

PAGE, PAGES = 4, 64
LENGTH = 3 * CHUNK + 5


def write(directory: Path, **keys: Any) -> Path:
    """Two layers without experts; `keys`: those of config.json that differ."""
    config = {"num_hidden_layers": 2, "moe_layers": [], "intermediate_size_mlp": 96, "floor_scale": 8}
    write_tiny(Llama4TextConfig(**{**COMMON, **config, "attention_chunk_size": CHUNK, **keys}), directory, 0)
    return directory


def logits_after(runner: ModelRunner, driver: Driver, ids: list[int], chunk: int) -> torch.Tensor:
    """Ours of each token of `ids`, computed in chunks: [tokens, vocab]."""
    lane, rows = driver.add(ids), []
    with torch.inference_mode():
        while lane.done < len(ids):
            count = min(chunk, len(ids) - lane.done)
            rows.append(runner.logits(driver.batch([(lane, count)]), np.arange(count)))
    return torch.cat(rows)


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_a_token_sees_its_chunk_alone(attention: str, tmp_path: Path) -> None:
    """The first token of a chunk sees itself, the last one all of it; of one layer, so that no token is seen
    through another. Every page that slid out of the window is spoilt."""
    path = write(tmp_path, num_hidden_layers=1, no_rope_layers=[1])
    rng = random.Random(0)
    ids = [rng.randrange(256) for _ in range(LENGTH)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    runner, pools = open_pools(path, PAGE, PAGES, attention=attention)
    for chunk in (LENGTH, CHUNK + 3, CHUNK, 7, 1):
        ours = logits_after(runner, Driver(runner, PAGES, PAGE, window_pool=pools["window"]), ids, chunk)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    changed = [(ids[0] + 1) % 256, *ids[1:]]
    other = logits_after(runner, Driver(runner, PAGES, PAGE, window_pool=pools["window"]), changed, LENGTH)
    differs = (other - ours).abs().amax(-1) > 1e-3
    assert differs[:CHUNK].all()
    assert not differs[CHUNK:].any()


def test_queries_are_scaled_by_their_positions_in_a_pack(tmp_path: Path) -> None:
    """Of layers that see everything, without rotary embedding, several sequences in one pack."""
    path = write(tmp_path, no_rope_layers=[0, 0], attn_scale=2.0)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (40, 3, 25)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    runner, _ = open_runner(path, PAGE, PAGES, "float32", "auto", "auto")
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in prompts]
    with torch.inference_mode():
        theirs = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
        batch = driver.batch([(lane, len(prompt)) for lane, prompt in zip(lanes, prompts, strict=True)])
        ours = runner.logits(batch, np.arange(len(theirs)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_mixture_computes_what_transformers_does(top_k: int) -> None:
    torch.manual_seed(top_k)
    config = Llama4TextConfig(**COMMON, num_local_experts=5, num_experts_per_tok=top_k)
    mixture = Llama4TextMoe(config)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 17, 64)
    with torch.inference_mode():
        expected, _ = mixture(x)
        mixture.experts = Llama4Experts(mixture.experts)
        found, _ = Llama4Mixture(mixture)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_and_routers_are_packed_for_the_cpu(tmp_path: Path) -> None:
    packing_isas()
    path = write(tmp_path, moe_layers=[1], num_local_experts=4)
    replaced = load_model(EngineConfig(str(path), dtype="bfloat16")).replaced
    assert (replaced["Llama4Experts"], replaced["Llama4Router"]) == (1, 1)
