"""Which tokens end an answer: those of the model's generation_config.json, or of a named folder's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.loader import load_model
from tests.support.tiny_models import make_tiny


def test_tokens_that_the_model_does_not_have_end_nothing(tmp_path: Path) -> None:
    """Else a request with min_tokens would forbid them, and fail."""
    model = make_tiny("llama", tmp_path / "model", seed=1)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1 << 20, -1]}))
    assert load_model(EngineConfig(str(model), overlap=False)).spec.eos_token_ids == (5,)


def test_a_folder_that_was_named_lists_the_end_tokens(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model", seed=1)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    named = tmp_path / "named"
    named.mkdir()
    (named / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    for source, want in (("auto", (5, 6)), ("vllm", (5, 6)), (str(named), (7,))):
        loaded = load_model(EngineConfig(str(model), generation_config=source, overlap=False))
        assert loaded.spec.eos_token_ids == want


def test_a_file_that_transformers_refuses_is_a_config_error(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model", seed=1)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "max_new_tokens": 0}))
    with pytest.raises(ConfigError, match=r"generation_config\.json of .*max_new_tokens") as refused:
        load_model(EngineConfig(str(model), overlap=False))
    assert refused.value.key == "generation_config"
