"""Families whose last layers read keys and values of earlier ones: what has pages, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4TextConfig

from engine.batch import ScoredPrompt
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.families.base import Dtypes
from engine.gate import check_model
from engine.loader import load_model
from kvcache.layout import KVGroupSpec
from tests.engine.conftest import PROMPTS
from tests.support.driver import Driver, Lane, open_pools
from tests.support.tiny_configs import MIXED
from tests.support.tiny_models import make_tiny

FLOAT32 = Dtypes(torch.float32, torch.float32)
WINDOW = 24


def test_only_layers_with_keys_and_values_have_pages(tmp_path: Path) -> None:
    loaded = load_model(EngineConfig(str(make_tiny("gemma4_text", tmp_path, 0))))
    assert loaded.spec.groups == (
        KVGroupSpec((1, 3), 1, 32, torch.float32),
        KVGroupSpec((0, 2), 2, 16, torch.float32, name="window", window=WINDOW),
    )
    assert loaded.shared == {4: 2, 5: 3}
    assert [facts.kv_layer for facts in loaded.attention] == [0, 1, 2, 3, 2, 3]


def test_gemma_3ns_full_and_sliding_layers_have_the_same_heads(tmp_path: Path) -> None:
    loaded = load_model(EngineConfig(str(make_tiny("gemma3n_text", tmp_path, 0))))
    full = KVGroupSpec((1, 3), 2, 16, torch.float32)
    assert loaded.spec.groups == (full, replace(full, layer_ids=(0, 2), name="window", window=WINDOW))
    assert loaded.shared == {4: 2, 5: 3}


def config_with(**changed: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(**{**MIXED["gemma4_text"]().to_dict(), **changed})


def test_a_model_of_full_layers_alone_has_one_group() -> None:
    config = config_with(layer_types=["full_attention"] * 6, per_layer_config=None)
    family = check_model(config)
    assert family.groups(config, FLOAT32) == (KVGroupSpec((0, 1, 2, 3), 2, 16, torch.float32),)
    assert family.shared(config) == {4: 3, 5: 3}


def test_the_tokens_of_an_image_may_see_one_another_but_not_those_of_text() -> None:
    check_model(config_with(use_bidirectional_attention="vision"))
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        check_model(config_with(use_bidirectional_attention="all"))


def test_shared_layers_need_embeddings_of_each_layer() -> None:
    """transformers' generate raises without them."""
    with pytest.raises(UnsupportedModel, match="num_kv_shared_layers is 2"):
        check_model(config_with(hidden_size_per_layer_input=0))
    check_model(config_with(hidden_size_per_layer_input=0, num_kv_shared_layers=0))


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_shared_layers_compute_only_tokens_that_are_read(family: str, tmp_path: Path) -> None:
    """None of a chunk that does not end its prompt; one of a chunk that does, and of a decode row; all of a
    prompt whose tokens are scored."""
    runner, pools = open_pools(make_tiny(family, tmp_path, 0), 16, 40)
    counts: list[tuple[int, int]] = []
    for number, layer in enumerate(runner.forward.decoder.decoder.layers):
        layer.register_forward_pre_hook(
            lambda _, given, number=number: counts.append((number, given[0].shape[-2]))
        )

    def rows(work: list[tuple[Lane, int]], scores: bool = False) -> list[int]:
        """Tokens that each layer computes."""
        counts.clear()
        if scores:
            scored = (ScoredPrompt(0, np.array(PROMPTS[2][1:9]), 1),)
            assert len(runner.issue(replace(driver.batch(work), scored=scored))().scored[0]) == 8
        else:
            driver.step(work)
        return [sum(count for at, count in counts if at == number) for number in range(6)]

    driver = Driver(runner, 40, 16, window_pool=pools["window"])
    first, second, third = (driver.add(prompt) for prompt in PROMPTS)
    assert rows([(second, 20)]) == [20] * 4 + [0, 0]
    assert rows([(second, 13), (third, 9)]) == [22] * 4 + [1, 1]
    assert rows([(second, 1), (first, 5), (third, 10)]) == [16] * 4 + [2, 2]
    assert rows([(second, 1), (first, 1)]) == [2] * 6
    assert rows([(driver.add(PROMPTS[2]), 9), (third, 7)], scores=True) == [16] * 4 + [9, 9]
    assert rows([(driver.add(PROMPTS[2]), 9), (first, 1)], scores=True) == [10] * 6


def test_the_batch_of_tokens_that_are_read(tmp_path: Path) -> None:
    runner, _ = open_pools(make_tiny("gemma4_text", tmp_path, 0), 16, 40)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(PROMPTS[2]) for _ in range(4)]
    batch = driver.batch([(lanes[0], 9), (lanes[1], 64), (lanes[2], 5), (lanes[3], 64)])
    batch = replace(batch, scored=(ScoredPrompt(2, np.array([1, 2, 3]), 1),))
    rows = [72, 73, 74, 75, 76, 77, 141]
    reads = batch.read_rows()
    assert reads is not None
    assert reads.rows.tolist() == rows
    only = batch.only(reads)
    for name in ("input_ids", "positions", "out_slots"):
        assert getattr(only, name).tolist() == getattr(batch, name)[rows].tolist()
    for name in ("rows", "seq_lens", "page_table"):
        assert getattr(only, name).tolist() == getattr(batch, name)[1:].tolist()
    assert only.q_lens.tolist() == [1, 5, 1]
    assert only.sampled.tolist() == [0, 2]
    assert only.sampling is batch.sampling
    windows, of_all = only.for_window(), batch.for_window()
    assert windows.page_table.tolist() == of_all.page_table[1:].tolist()
    assert windows.out_slots.tolist() == of_all.out_slots[rows].tolist()
