"""DeepSeek-V3.2 and GLM-5, whose indexers choose the tokens that attention sees, against
transformers.generate token by token, in float32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig, MistralLarge4TextConfig

from engine.backends.sparse_reference import TorchSparseAttention
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from engine.paged_layers import IndexInputs
from engine.token_choice import TokenChoice
from kvcache.layout import LatentGroupSpec
from kvcache.pool import MLAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.engine.latent_checks import check_greedy, check_pages_elsewhere, ways_to_pack
from tests.support.driver import Driver, open_runner
from tests.support.reference import draw_model
from tests.support.spoilt import Spoilt, nothing
from tests.support.tiny_configs import MIXED, SIMILAR

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4_text")
PAGE, TOKENS, TOP = 16, 24, 24
_random = random.Random(5)
PROMPT = [_random.randrange(256) for _ in range(70)]


@pytest.mark.covering
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["torch", "cpu"])
@ways_to_pack
def test_greedy_tokens_equal_generate(
    family: str, attention: str, page_size: int, chunk: int, stagger: int, drawn: Drawn
) -> None:
    check_greedy(drawn(family), attention, page_size, chunk, stagger)


def test_chunks_are_computed_in_blocks(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.query_blocks.SCORES_AT_ONCE", 3000)
    path, expected = drawn("deepseek_v32")
    runner, _ = open_runner(path, PAGE, 12, attention="torch")
    driver = Driver(runner, 12, PAGE)
    lane = driver.add(PROMPTS[2])
    driver.generate([lane], 8)
    assert lane.outputs == expected[2][:8]


def test_pages_hold_all_that_another_engine_needs(drawn: Drawn) -> None:
    check_pages_elsewhere(drawn("deepseek_v32"), 2)


def test_a_row_ends_with_the_index_key(drawn: Drawn) -> None:
    path, _ = drawn("glm_moe_dsa")
    spec = load_model(EngineConfig(str(path))).spec
    assert spec.groups == (LatentGroupSpec((0, 1, 2, 3), 32, 8, torch.float32, index_dim=16),)
    runner, pool = open_runner(path, PAGE, 12)
    driver = Driver(runner, 12, PAGE)
    pool.bytes.zero_()
    lane = driver.add(PROMPT)
    driver.generate([lane], 2, chunk=40)
    keys = pool.data[lane.pages[0], ..., 40:]
    assert keys[[0, 2]].all()
    assert not keys[[1, 3]].any(), "layers that have no indexer have no keys"


# What a spoilt choice does


def stale_index_keys(batch: ForwardBatch, pool: MLAKVCache) -> ForwardBatch:
    """The tokens of a page have the index keys of an earlier page, and all else of their own."""
    page, earlier = batch.page_table[0, [2, 1]].tolist()
    pool.data[page, ..., pool.spec.key_dim :] = pool.data[earlier, ..., pool.spec.key_dim :]
    return batch


def new_row_not_written(batch: ForwardBatch, _pool: MLAKVCache) -> ForwardBatch:
    return replace(batch, out_slots=np.zeros_like(batch.out_slots))


@pytest.mark.parametrize("family", FAMILIES)
def test_spoilt_pages_are_seen(family: str, tmp_path: Path) -> None:
    path, [answer] = draw_model(family, tmp_path, 0, [PROMPT], TOKENS)
    right = {}
    for spoil in (nothing, stale_index_keys, new_row_not_written):
        runner, pool = open_runner(path, PAGE, 12)
        driver = Driver(Spoilt(runner, pool, spoil), 12, PAGE)
        lane = driver.add(PROMPT)
        driver.generate([lane], TOKENS, chunk=40)
        right[spoil.__name__] = lane.outputs == answer
    assert [name for name, equal in right.items() if equal] == ["nothing"]


@pytest.mark.parametrize("top", [TOP - 1, TOP + 1, 1000])
def test_another_number_of_chosen_tokens_is_seen(top: int, drawn: Drawn) -> None:
    path, expected = drawn("deepseek_v32")
    runner, _ = open_runner(path, PAGE, 12)
    backend: Any = runner.forward.attention.latent
    backend._choice = TokenChoice(top)
    driver = Driver(runner, 12, PAGE)
    lane = driver.add(PROMPTS[2])
    driver.generate([lane], len(expected[2]))
    assert lane.outputs != expected[2]


# The backend alone


def test_a_query_sees_what_is_chosen_of_what_came_before_it() -> None:
    """Rows of zeros and ones: a sum of latents says which tokens were attended to."""
    tokens, top = 9, 3
    pool = MLAKVCache(LatentGroupSpec((0,), tokens, 2, torch.float32, index_dim=2), 3, 4)
    backend = TorchSparseAttention(pool, heads=1, scale=1.0, choice=TokenChoice(top))
    longs, table = np.arange(tokens), np.array([[2, 1, 3]], np.int32)
    batch: Any = ForwardBatch(
        longs, longs, table[0, longs // 4] * 4 + longs % 4, np.ones(1, np.int32),
        *(np.array([tokens], np.int32) for _ in range(2)), table, np.zeros(0, np.int32), None,  # type: ignore[arg-type]
    )  # fmt: skip
    backend.prepare(batch)
    worth = torch.tensor([5.0, 1, 7, 2, 9, 3, 8, 4, 6])
    keys = torch.stack((worth, torch.zeros(tokens)), dim=1)
    q = torch.tensor([1.0, 0]).expand(tokens, 2, 2)
    backend.select(0, IndexInputs(q, keys, torch.tensor([0.5, 0.25]).expand(tokens, 2)))
    latents, zeros = torch.eye(tokens), torch.zeros(tokens, 2)
    out = torch.empty(tokens, 1, tokens)
    backend.forward(0, torch.zeros(tokens, 1, tokens), zeros[:, None], latents, zeros, out)
    seen = [set(row.nonzero().flatten().tolist()) for row in out[:, 0]]
    assert seen == [set(sorted(range(i + 1), key=lambda j: -worth[j])[:top]) for i in range(tokens)]


# The gate


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DeepseekV32Config(topk_method="greedy"), "topk_method is 'greedy'"),
        (DeepseekV32Config(kv_lora_rank=0), "kv_lora_rank is 0"),
        (GlmMoeDsaConfig(num_hidden_layers=2, indexer_types=["shared", "full"]), "begins with 'shared'"),
        (
            MistralLarge4TextConfig(
                num_hidden_layers=4, no_rope_layers=[1, 1, 1, 1], kv_source_layers=[0, 1, 0, 1]
            ),
            "layer 2 reads the latents of layer 0",
        ),
    ],
)
def test_variants_that_are_not_served_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        check_model(config)


def test_tiny_models_choose_less_than_their_contexts_have() -> None:
    for family in FAMILIES:
        config: Any = {**MIXED, **SIMILAR}[family]()
        assert config.index_topk == TOP < len(PROMPTS[1])
