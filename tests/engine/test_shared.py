"""Families whose last layers read keys and values of earlier ones: what has pages, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.families.base import Dtypes
from engine.gate import check_model
from engine.loader import load_model
from kvcache.layout import KVGroupSpec
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
