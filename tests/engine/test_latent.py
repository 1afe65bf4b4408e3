"""DeepSeek-V2 and V3 on pages of latents, against transformers.generate token by token, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.latent import LatentAttention
from engine.loader import load_model
from engine.runner import ModelRunner
from kvcache.layout import LatentGroupSpec
from kvcache.pool import MLAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.latent_checks import check_greedy, check_pages_elsewhere, ways_to_pack
from tests.support.cpu_kernels import packing_isas
from tests.support.driver import Driver, open_runner
from tests.support.reference import draw_model, reference_answers
from tests.support.spoilt import Spoilt, nothing
from tests.support.tiny_models import make_tiny, write_tiny

_random = random.Random(5)
PROMPT = [_random.randrange(256) for _ in range(70)]
LONG = [_random.randrange(256) for _ in range(400)]
"""Longer than yarn's original context, and than what one thread takes of a decoding token's."""

VARIANTS = ("deepseek_v2", "deepseek_v2_lora", "deepseek_v3", "deepseek_v3_halves")


@pytest.mark.covering
@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("attention", ["torch", "auto"])
@ways_to_pack
def test_greedy_tokens_equal_generate(
    family: str, attention: str, page_size: int, chunk: int, stagger: int, drawn: Drawn
) -> None:
    check_greedy(drawn(family), attention, page_size, chunk, stagger)


def test_yarn_scales_angles_and_scores_as_transformers_does(tmp_path: Path) -> None:
    """DeepSeek-V2's rotation multiplies by one complex factor that holds yarn's."""
    path = make_tiny("deepseek_v2", tmp_path, 0)
    config = DeepseekV2Config.from_pretrained(path)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.9}
    config.rope_parameters = {**yarn, "original_max_position_embeddings": 256}
    write_tiny(config, tmp_path / "yarn", 3)
    runner, _ = open_runner(tmp_path / "yarn", 16, 40, attention="auto")
    driver = Driver(runner, 40, 16)
    prompts = [*PROMPTS, LONG]
    lanes = [driver.add(prompt) for prompt in prompts]
    driver.generate(lanes, 32, chunk=90)
    expected = reference_answers(tmp_path / "yarn", prompts, 32)
    assert min(margin for _, margin in expected) > 1e-4
    assert [lane.outputs for lane in lanes] == [tokens for tokens, _ in expected]


def test_pages_hold_all_that_another_engine_needs(drawn: Drawn) -> None:
    check_pages_elsewhere(drawn("deepseek_v3"), 1)


def test_the_weights_of_the_expansion_exist_once(tmp_path: Path) -> None:
    path = make_tiny("deepseek_v3", tmp_path, 0)
    model = load_model(EngineConfig(str(path), linear="torch")).model
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    assert not [name for name, _ in model.named_modules() if name.endswith("kv_b_proj")]
    stored = load_file(path / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
    joined = torch.cat((attention.w_uk, attention.w_uv.transpose(1, 2)), dim=1)
    assert torch.equal(joined.flatten(0, 1), stored)


def test_the_spec_names_the_latent_group(tmp_path: Path) -> None:
    spec = load_model(EngineConfig(str(make_tiny("deepseek_v2", tmp_path, 0)))).spec
    assert spec.groups == (LatentGroupSpec((0, 1, 2, 3), 32, 8, torch.float32),)


# What a spoilt page does


PAGE, TOKENS = 16, 24


def last_page_swapped(batch: ForwardBatch, _pool: MLAKVCache) -> ForwardBatch:
    """The last page is read in part, so it matters which it is."""
    table, last = batch.page_table.copy(), (int(batch.seq_lens[0]) - 1) // PAGE
    table[0, [1, last]] = table[0, [last, 1]]
    return replace(batch, page_table=table)


def stale_latents(batch: ForwardBatch, pool: MLAKVCache) -> ForwardBatch:
    """The tokens before this one hold the latents of an earlier page; their rotated keys are right."""
    page, earlier = batch.page_table[0, [2, 1]].tolist()
    pool.data[page, ..., : pool.spec.kv_lora_rank] = pool.data[earlier, ..., : pool.spec.kv_lora_rank]
    return batch


def stale_ropes(batch: ForwardBatch, pool: MLAKVCache) -> ForwardBatch:
    page, earlier = batch.page_table[0, [2, 1]].tolist()
    pool.data[page, ..., pool.spec.kv_lora_rank :] = pool.data[earlier, ..., pool.spec.kv_lora_rank :]
    return batch


def new_row_not_written(batch: ForwardBatch, _pool: MLAKVCache) -> ForwardBatch:
    return replace(batch, out_slots=np.zeros_like(batch.out_slots))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_spoilt_pages_are_seen(family: str, tmp_path: Path) -> None:
    path, [answer] = draw_model(family, tmp_path, 0, [PROMPT], TOKENS)
    right = {}
    for spoil in (nothing, last_page_swapped, stale_latents, stale_ropes, new_row_not_written):
        runner, pool = open_runner(path, PAGE, 12, attention="auto")
        driver = Driver(Spoilt(runner, pool, spoil), 12, PAGE)
        lane = driver.add(PROMPT)
        driver.generate([lane], TOKENS, chunk=40)
        right[spoil.__name__] = lane.outputs == answer
    assert [name for name, equal in right.items() if equal] == ["nothing"]


# Experts


def hits_and_logits(path: Path) -> tuple[dict[str, set[int]], torch.Tensor]:
    """Which experts each router chose for a token, and its logits, with packed weights in bfloat16."""
    config = EngineConfig(str(path), dtype="bfloat16", linear="packed", overlap=False)
    loaded = load_model(config)
    assert any(name.endswith("Experts") for name in loaded.replaced)
    hits: dict[str, set[int]] = {}

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            hits[name] = set(output[2].flatten().tolist())

        return hook

    for name, module in loaded.model.named_modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.register_forward_hook(note(name.removesuffix(".gate")))
    pool = MLAKVCache(loaded.spec.groups[0], 4, PAGE)  # type: ignore[arg-type]
    runner = ModelRunner(loaded, {"latent": pool}, config)
    driver = Driver(runner, 4, PAGE)
    lane = driver.add([17])
    with torch.inference_mode():
        return hits, runner.logits(driver.batch([(lane, 1)]), np.arange(1))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_packed_experts_that_no_token_chose_are_not_read(family: str, tmp_path: Path) -> None:
    """Spoilt in the checkpoint, for a pack does not show its weights. See test_experts.py for the others."""
    packing_isas()  # skipped without any
    path = make_tiny(family, tmp_path, 0)
    hits, want = hits_and_logits(path)
    assert len(hits) == 2  # the layers after first_k_dense_replace
    weights, poisoned = load_file(path / "model.safetensors"), 0
    for name, weight in weights.items():
        layer, _, rest = name.partition(".experts.")
        if layer in hits and int(rest.partition(".")[0]) not in hits[layer]:
            weight.fill_(torch.nan)
            poisoned += 1
    assert poisoned == 2 * (8 - 3) * 3
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    again, got = hits_and_logits(path)
    assert again == hits
    assert torch.equal(got, want)


# The gate


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            DeepseekV3Config(quantization_config={"quant_method": "fp8", "weight_block_size": 128}),
            "weight_block_size is 128",
        ),
        (DeepseekV2Config(topk_method="noaux_tc"), "topk_method is 'noaux_tc'"),
        (DeepseekV2Config(norm_topk_prob=True), "norm_topk_prob is True"),
        (DeepseekV3Config(topk_method="greedy"), "topk_method is 'greedy'"),
        (DeepseekV3Config(scoring_func="softmax"), "scoring_func is 'softmax'"),
        (DeepseekV3Config(moe_layer_freq=2), "moe_layer_freq is 2"),
        (DeepseekV3Config(kv_lora_rank=0), "kv_lora_rank is 0"),
        (DeepseekV3Config(index_topk=2048), "index_topk is 2048"),
        (DeepseekV3Config(architectures=["DeepseekV32ForCausalLM"]), "not DeepseekV3ForCausalLM"),
    ],
)
def test_variants_that_are_not_served_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        check_model(config)
