"""GLM-5.3-Flash, whose indexers choose k-pools of tokens, against transformers.generate token by token, in
float32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Glm5NextTextConfig

from engine.backends.flashinfer_limits import check_index
from engine.backends.pick import BackendUnavailable
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from engine.token_choice import TokenChoice
from kvcache.layout import LatentGroupSpec
from kvcache.pool import MLAKVCache
from tests.engine.conftest import PROMPTS, Drawn
from tests.support.driver import Driver, open_pools
from tests.support.reference import draw_model
from tests.support.spoilt import Spoilt, nothing
from tests.support.tiny_configs import MIXED

FAMILY = "glm5_next_text"
PAGE, TOKENS, KPOOL = 16, 24, 8
_random = random.Random(5)
PROMPT = [_random.randrange(256) for _ in range(70)]


def opened(path: Path, **options: Any) -> tuple[Any, MLAKVCache, Any]:
    runner, pools = open_pools(path, PAGE, 12, **options)
    return runner, pools["latent"], pools


# The choice alone


def test_a_query_sees_the_best_kpools_and_the_one_that_is_not_whole() -> None:
    """K-pools of 4 tokens, of which 2 are chosen: queries that 3, 8, 10 and 16 tokens are visible to."""
    choice = TokenChoice(top=8, kpool=4)
    visible = torch.tensor([3, 8, 10, 16])
    best = torch.tensor([[0, 1], [1, 0], [1, 0], [3, 0]])
    found = choice.tokens(best, visible)
    counts = choice.of_visible(visible)
    assert found.shape == (4, choice.most) == (4, 11)
    assert counts.tolist() == choice.seen(visible.numpy() - 1).tolist() == [3, 8, 10, 8]
    seen = [set(row[:count].tolist()) for row, count in zip(found, counts, strict=True)]
    assert seen == [{0, 1, 2}, set(range(8)), set(range(10)), {0, 1, 2, 3, 12, 13, 14, 15}]


def test_kpools_of_one_token_are_tokens() -> None:
    choice, best = TokenChoice(top=3), torch.tensor([[4, 0, 2]])
    assert choice.tokens(best, torch.tensor([9])) is best
    assert choice.seen(np.array([0, 1, 2, 8])).tolist() == [1, 2, 3, 3]
    assert [choice.kpools(context) for context in (1, 2, 9)] == [1, 2, 3]
    assert [TokenChoice(24, 8).kpools(context) for context in (1, 8, 15, 16, 100)] == [1, 1, 1, 2, 3]


# Where the keys are


def test_the_key_of_a_kpool_is_where_that_of_its_last_token_was(drawn: Drawn) -> None:
    """Another one is there before the k-pool is whole."""
    path, _ = drawn(FAMILY)
    spec = load_model(EngineConfig(str(path))).spec
    assert spec.groups[0] == LatentGroupSpec((1, 2, 3), 32, 64, torch.float32, index_dim=32)
    runner, pool, _ = opened(path)
    driver = Driver(runner, 12, PAGE)
    lane = driver.add(PROMPT)
    driver.generate([lane], 1, chunk=KPOOL - 1)
    page = pool.data[lane.pages[1], 0]
    keys, gates = page[:KPOOL, 96:112], page[:KPOOL, 112:]
    assert gates.any(1).all()
    indexer: Any = runner.forward.decoder.layers[1].self_attn.indexer
    with torch.inference_mode():
        weights = (gates + indexer.bias).softmax(0)
    rest = keys[KPOOL - 1] - (weights * keys)[: KPOOL - 1].sum(0)  # what the last token's own key adds
    own = rest / weights[KPOOL - 1]
    assert not torch.allclose(own, keys[KPOOL - 1], atol=1e-2)


def stale_kpool_keys(batch: ForwardBatch, pool: MLAKVCache) -> ForwardBatch:
    """Two k-pools have the keys of each other, and all else of their own."""
    page, other = batch.page_table[0, [1, 2]].tolist()
    last = KPOOL - 1
    pool.data[[page, other], :, last, 96:112] = pool.data[[other, page], :, last, 96:112]
    return batch


def keys_of_other_tokens(batch: ForwardBatch, pool: MLAKVCache) -> ForwardBatch:
    """What whole k-pools were made of is not read again."""
    page = int(batch.page_table[0, 1])
    pool.data[page, :, : KPOOL - 1, 96:] = torch.nan
    return batch


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_what_is_spoilt_is_seen(attention: str, tmp_path: Path) -> None:
    path, [answer] = draw_model(FAMILY, tmp_path, 0, [PROMPT], TOKENS)
    right = {}
    for spoil in (nothing, stale_kpool_keys, keys_of_other_tokens):
        runner, pool, _ = opened(path, attention=attention)
        driver = Driver(Spoilt(runner, pool, spoil), 12, PAGE)
        lane = driver.add(PROMPT)
        driver.generate([lane], TOKENS, chunk=40)
        right[spoil.__name__] = lane.outputs == answer
    assert [name for name, equal in right.items() if equal] == ["nothing", "keys_of_other_tokens"]


@pytest.mark.parametrize("choice", [TokenChoice(16, 8), TokenChoice(32, 8), TokenChoice(24, 4)])
def test_another_choice_is_seen(choice: TokenChoice, drawn: Drawn) -> None:
    path, expected = drawn(FAMILY)
    runner, _, _ = opened(path)
    backend: Any = runner.forward.attention.latent
    backend._choice = choice
    driver = Driver(runner, 12, PAGE)
    lane = driver.add(PROMPTS[2])
    driver.generate([lane], len(expected[2]))
    assert lane.outputs != expected[2]


# What is refused


def test_pages_without_whole_kpools_are_not_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "available", lambda: True)
    spec = LatentGroupSpec((0,), 512, 64, torch.bfloat16, index_dim=256)
    check_index(MLAKVCache(spec, 2, 16), TokenChoice(2048, 16))
    with pytest.raises(BackendUnavailable, match="pages of 8 have no whole k-pools of 16 tokens"):
        check_index(MLAKVCache(spec, 2, 8), TokenChoice(2048, 16))
    with pytest.raises(BackendUnavailable, match="not of 24"):
        check_index(MLAKVCache(replace(spec, index_dim=24), 2, 16), TokenChoice(2048))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is False"),
        ({"indexer_types": ["full", "shared", "full", "full", "full"]}, "layer 1 goes on with a choice"),
        ({"indexer_types": ["full", "full", "shared", "shared", "full"]}, "layer 3 goes on with a choice"),
    ],
)
def test_variants_that_are_not_served_are_refused_by_name(keys: dict[str, Any], named: str) -> None:
    config = Glm5NextTextConfig(**{**MIXED[FAMILY]().to_dict(), **keys})
    with pytest.raises(UnsupportedModel, match=named):
        check_model(config)
