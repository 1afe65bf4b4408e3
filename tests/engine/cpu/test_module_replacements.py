"""Which modules of a model the CPU replacements replace."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaModel

from engine.config import EngineConfig
from engine.cpu.decoder import FusedDecoder, fusible
from engine.cpu.experts import PackedExperts
from engine.cpu.linear import PackedLinear
from engine.cpu.router import PackedWeight
from engine.loader import load_model
from tests.support.cpu_kernels import packing_isas
from tests.support.tiny_configs import FAMILIES
from tests.support.tiny_models import make_tiny

packing_isas()  # skipped without any
FUSED = (
    *("gpt_oss", "llama", "llama_bias", "llama_yarn", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "seed_oss"),
)
FUSED_OTHERS = (
    *("apertus", "arcee", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone_moe", "gemma2"),
    *("gemma3_text", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "hy_v3", "hyperclovax"),
    *("kolibri1", "mellum", "ministral", "mistral_window", "phi3_window", "smollm3", "solar_open"),
)


@pytest.mark.parametrize("family", [*FAMILIES, *FUSED_OTHERS])
def test_what_is_fused_and_packed_in_bfloat16(family, tmp_path):
    """What comes out of it: tests/engine/test_oracle_bfloat16.py."""
    loaded = load_model(EngineConfig(str(make_tiny(family, tmp_path, 3)), dtype="bfloat16"))
    assert isinstance(loaded.model.model, FusedDecoder) == (family in (*FUSED, *FUSED_OTHERS))
    head = loaded.model.lm_head
    assert isinstance(getattr(head, "head", head), PackedLinear)


def test_float32_keeps_transformers_modules(tmp_path):
    loaded = load_model(EngineConfig(str(make_tiny("qwen3", tmp_path, 0)), dtype="float32"))
    assert loaded.replaced == {}


@pytest.mark.parametrize(
    "options", [{"attention": "torch"}, {"linear": "torch"}], ids=["torch_attention", "torch_linear"]
)
def test_the_fused_decoder_needs_both_cpu_backends(options, tmp_path):
    path = str(make_tiny("qwen3", tmp_path, 0))
    loaded = load_model(EngineConfig(path, dtype="bfloat16", **options))
    assert not isinstance(loaded.model.model, FusedDecoder)
    assert ("Linear" in loaded.replaced) == ("linear" not in options)


def test_heads_that_are_rotated_in_part_are_not_fused():
    """Phi 3's alone are, by transformers, too."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    for parameters, want in ((rope, False), ({**rope, "partial_rotary_factor": 1.0}, True)):
        model = LlamaModel(LlamaConfig(**shape, vocab_size=64, rope_parameters=parameters)).bfloat16()
        assert fusible(model) == want


@pytest.mark.parametrize(
    ("family", "outside"),
    [("llama", ""), ("llama_bias", "012"), ("glm4_moe", "2"), ("gpt_oss", "0123"), ("arcee", "012")],
)
def test_mlps_that_are_not_gated_or_have_biases_are_computed_outside(family, outside, tmp_path):
    loaded = load_model(EngineConfig(str(make_tiny(family, tmp_path, 3)), dtype="bfloat16"))
    assert "".join(loaded.model.model.outside) == outside


def test_routers_and_experts_of_a_fused_decoder_are_packed(tmp_path):
    loaded = load_model(EngineConfig(str(make_tiny("gpt_oss", tmp_path, 3)), dtype="bfloat16"))
    for mlp in loaded.model.model.outside.values():
        assert isinstance(mlp.experts, PackedExperts)
        assert isinstance(mlp.router.weight, PackedWeight)


def test_experts_of_another_decoder_are_packed(tmp_path):
    loaded = load_model(EngineConfig(str(make_tiny("qwen3_next", tmp_path, 3)), dtype="bfloat16"))
    assert {"Qwen3NextTopKRouter", "Qwen3NextExperts"} <= set(loaded.replaced)
