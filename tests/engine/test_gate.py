"""Refusals by name, each in one line with the key and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mistral4Config,
    MistralConfig,
    PersimmonConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from tests.support.tiny_configs import FAMILIES, SIMILAR
from tests.support.tiny_models import make_tiny


def test_a_config_for_code_in_the_checkpoint_is_that_of_the_same_model_in_transformers(
    tmp_path: Path,
) -> None:
    """Kimi K2's config.json."""
    path = make_tiny("deepseek_v3", tmp_path, 0)
    before = load_model(EngineConfig(str(path))).spec
    settings = json.loads((path / "config.json").read_text())
    settings["torch_dtype"] = settings.pop("dtype")
    theirs = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (path / "config.json").write_text(json.dumps(settings | theirs))
    assert load_model(EngineConfig(str(path))).spec == before


def with_field(config: PretrainedConfig, **fields: Any) -> PretrainedConfig:
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "factor": 2.0, **fields}


@pytest.mark.parametrize("family", sorted({**FAMILIES, **SIMILAR}))
def test_every_tested_family_passes(family: str) -> None:
    check_model({**FAMILIES, **SIMILAR}[family]())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2Config(), "model_type 'gpt2'"),
        (PersimmonConfig(), "model_type 'persimmon' in config.json: it is not in the table"),
        (JambaConfig(), "model_type 'jamba' in config.json: transformers' scan"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "no causal LM head"),
        (LlamaConfig(architectures=["Llama4ForCausalLM"]), "not LlamaForCausalLM"),
        (with_field(LlamaConfig(), sliding_window=128), "sliding_window is 128"),
        (MistralConfig(sliding_window=0), "sliding_window is 0"),
        (MistralConfig(sliding_window=1), "sliding_window is 1"),
        (
            with_field(MistralConfig(sliding_window=128), layer_types=["full_attention"] * 32),
            "every layer is sliding_attention",
        ),
        (
            with_field(Qwen3MoeConfig(), layer_types=["sliding_attention"] * 24),
            "every layer is full_attention",
        ),
        (Qwen2Config(num_hidden_layers=1, layer_types=["sliding_attention"]), "sliding_window is None"),
        (GptOssConfig(sliding_window=None), "sliding_window is None"),
        (Gemma3TextConfig(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (Gemma3TextConfig(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
        (
            with_field(Gemma3TextConfig(), rope_parameters={"full_attention": rope(rope_type="longest")}),
            "rope_type 'longest'",
        ),
        (
            Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]),
            "holds chunked_attention",
        ),
        (Llama4TextConfig(attention_chunk_size=None), "attention_chunk_size is None"),
        (with_field(LlamaConfig(), is_causal=False), "bidirectional"),
        (with_field(LlamaConfig(), use_bidirectional_attention=True), "bidirectional"),
        (with_field(LlamaConfig(), alibi=True), "alibi is True"),
        (with_field(LlamaConfig(), attention_chunk_size=64), "attention_chunk_size is 64"),
        (with_field(LlamaConfig(), final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (with_field(LlamaConfig(), attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (with_field(LlamaConfig(), num_kv_shared_layers=2), "num_kv_shared_layers is 2"),
        (with_field(LlamaConfig(), index_topk=8), "index_topk is 8"),
        (with_field(LlamaConfig(), kv_lora_rank=8), "kv_lora_rank is 8"),
        (with_field(LlamaConfig(), rope_parameters=rope(rope_type="longest")), "rope_type 'longest'"),
        (Mistral4Config(rope_parameters=rope(rope_type="default")), "no llama_4_scaling_beta"),
    ],
)
def test_a_feature_that_would_be_computed_wrongly_is_refused(config: PretrainedConfig, named: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        check_model(config)
    message = str(refused.value)
    assert message.startswith("model: ")
    assert named in message
    assert "; use " in message
    assert "\n" not in message
    assert refused.value.key == "model"


@pytest.mark.parametrize(("name", "is_right"), [("InternLM3", True), ("Llama", True), ("Qwen2", False)])
def test_a_class_may_have_the_name_that_checkpoints_with_code_give_it(name: str, is_right: bool) -> None:
    config = SIMILAR["internlm3"]()
    config.architectures = [f"{name}ForCausalLM"]
    if is_right:
        check_model(config)
    else:
        with pytest.raises(UnsupportedModel, match="not LlamaForCausalLM"):
            check_model(config)


def test_the_gate_stands_before_the_weights(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)  # no weights at all
    with pytest.raises(UnsupportedModel, match="gpt2"):
        load_model(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path / "nowhere", "there is no directory"),
        (lambda path: path, "contains no config.json"),
    ],
)
def test_a_directory_without_a_model_is_a_config_error(make: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        load_model(EngineConfig(str(make(tmp_path))))
    assert refused.value.key == "model"
    assert "\n" not in str(refused.value)


def test_a_directory_without_weights_is_a_config_error(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(EngineConfig(str(tmp_path)))


def without_a_norm(weights: Path) -> None:
    kept = {name: tensor for name, tensor in load_file(weights).items() if name != "model.norm.weight"}
    save_file(kept, weights, metadata={"format": "pt"})


def with_another_shape(weights: Path) -> None:
    save_file({**load_file(weights), "model.norm.weight": torch.ones(3)}, weights, metadata={"format": "pt"})


def cut_short(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_a_norm, r"no weights for model\.norm\.weight"),
        (with_another_shape, r"model\.norm\.weight is \(3,\), and by config\.json \(64,\)"),
        (cut_short, ""),
    ],
)
def test_damaged_weights_are_a_config_error(
    damage: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    path = make_tiny("llama", tmp_path, 0)
    damage(path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"cannot be loaded \({named}") as refused:
        load_model(EngineConfig(str(path)))
    assert "\n" not in str(refused.value)


def test_a_broken_config_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"max_position_embeddings": 2048.5}, "max_position_embeddings"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "rope"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "no_such_rope"}}, "no_such_rope"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ],
)
def test_a_field_that_transformers_cannot_use_is_a_config_error(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """Before any weight is read, and in one line that names the field."""
    config = json.loads((make_tiny("llama", tmp_path / "good", 0) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named) as refused:
        load_model(EngineConfig(str(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"attention": "magic"}, "attention_backend"),
        ({"linear": "x"}, "linear_backend"),
        ({"threads": -1}, "threads"),
        ({"model": ""}, "model"),
    ],
)
def test_an_impossible_option_names_its_key(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{"model": "somewhere", **fields})
    assert refused.value.key == key


def test_spec_says_what_the_checkpoint_says(tmp_path: Path) -> None:
    spec = load_model(EngineConfig(str(make_tiny("qwen3", tmp_path, 0)), dtype="bfloat16")).spec
    group = spec.groups[0]
    assert (group.layer_ids, group.kv_heads, group.head_dim) == ((0, 1, 2), 2, 32)
    assert (spec.vocab_size, spec.max_position, spec.eos_token_ids) == (320, 2048, (258,))
    assert spec.model_type == "qwen3"
    assert str(group.dtype) == str(spec.dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0}, 8192),
        ({"type": "linear", "factor": 4.0}, 2048),
        (
            {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 512,
            },
            512,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            2048,
        ),
    ],
)
def test_yarn_stretches_the_context(scaling: dict[str, Any] | None, positions: int, tmp_path: Path) -> None:
    """Added as Qwen's model cards say: max_position_embeddings stays what it was."""
    path = make_tiny("qwen2", tmp_path, 0)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    (path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert load_model(EngineConfig(str(path))).spec.max_position == positions


def test_fingerprint_tells_weights_and_dtypes_apart_and_nothing_else(tmp_path: Path) -> None:
    def fingerprint(family: str, seed: int, where: str = "a", **options: Any) -> str:
        path = make_tiny(family, tmp_path / where, seed)
        return load_model(EngineConfig(str(path), **options)).spec.fingerprint

    one = fingerprint("llama", 0)
    assert one == fingerprint("llama", 0, where="b", attention="torch", linear="torch", overlap=False)
    others = {fingerprint("llama", 1), fingerprint("mistral", 0), fingerprint("llama", 0, dtype="bfloat16")}
    assert len({one, *others}) == 4
