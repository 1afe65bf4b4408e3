"""Quantised checkpoints: their weights are exactly what their format defines, and so are the tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, LlamaConfig

from common.errors import ConfigError
from engine.checkpoint import base
from engine.checkpoint.grouped import gptq_format, packed_format
from engine.checkpoint.mxfp4 import MXFP4
from engine.checkpoint.scaled import fp8_format, scaled_format
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from engine.model_config import read_config
from tests.engine.conftest import PROMPTS
from tests.support.hand_off import pair
from tests.support.quantised_checkpoints import FORMATS, pack, packed, scaled, write
from tests.support.reference import MIN_MARGIN, reference_answers

CASES = [
    ("deepseek_v3", "fp8"),
    ("qwen3_moe", "fp8"),
    ("qwen3", "fp8_wide"),
    ("gpt_oss", "mxfp4"),
    ("llama", "awq"),
    ("mixtral", "awq"),
    ("qwen2", "gptq"),
    ("qwen3", "gptq_desc_act"),
    ("phi3", "gptq_v2"),
    ("llama_bias", "ct_int4"),
    ("gemma2", "ct_int4_zeros"),
    ("mistral_window", "ct_int8"),
    ("qwen2_moe", "ct_fp8"),
    ("minimax_m2", "fp8"),
    ("ministral3", "fp8_static"),
    ("deepseek_v4", "fp8_fp4"),
    ("minimax_m3_vl_text", "fp8"),
    ("mistral_large4_text", "fp8"),
    ("glm5_next_text", "fp8"),
    ("step3p5", "fp8"),
    ("nemotron_h", "modelopt_nvfp4"),
    ("qwen3_moe", "ct_nvfp4"),
    ("mixtral", "ct_mxfp4"),
    ("llama", "modelopt_mixed"),
]
ANSWER = 24
both_ways = pytest.mark.parametrize(("family", "form"), CASES, ids=map("-".join, CASES))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is dequantised in several blocks of rows."""
    monkeypatch.setattr(base, "_ELEMENTS_AT_ONCE", 1500)


def loaded_weights(path: Path, dtype: str) -> dict[str, torch.Tensor]:
    model = load_model(EngineConfig(str(path), dtype=dtype, linear="torch")).model
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def test_every_format_has_a_case() -> None:
    assert {form for _, form in CASES} == set(FORMATS)


@pytest.mark.covering
@both_ways
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_the_format_defines(family: str, form: str, dtype: str, directory: Path) -> None:
    """In float32 exactly, in bfloat16 that rounded once; and quantised they are others than before."""
    stored, exact = write(family, directory, 0, form)
    ours, theirs = loaded_weights(stored, dtype), loaded_weights(exact, dtype)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].equal(theirs[name]), name
    before = loaded_weights(directory / "plain" / f"{family}-0", dtype)
    changed = [name for name in ours if not ours[name].equal(before[name])]
    assert len(changed) > 3
    for name in changed:
        error = (ours[name].float() - before[name].float()).norm() / before[name].float().norm()
        assert error < 0.25, name


def test_settings_of_the_model_optimizer_may_be_in_a_file_of_their_own(directory: Path) -> None:
    stored, exact = write("llama", directory, 0, "modelopt_mixed")
    other = directory / "settings-apart"
    shutil.copytree(stored, other)
    config = json.loads((other / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (other / "config.json").write_text(json.dumps(config))
    path = other / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    ours, theirs = loaded_weights(other, "float32"), loaded_weights(exact, "float32")
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_AWQ"}}))
    with pytest.raises(UnsupportedModel, match="quant_algo is 'NVFP4_AWQ'"):
        loaded_weights(other, "float32")
    for text in ("{", "{}", "[]", '{"quantization": 5}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"hf_quant_config\.json: "):
            read_config(other, local=True)


@pytest.mark.oracle
@both_ways
def test_tokens_equal_generate_of_the_dequantised_model(family: str, form: str, directory: Path) -> None:
    """Colocated, with prefill and decode apart, in chunks, and from the cache."""
    for seed in range(30):
        stored, exact = write(family, directory, seed, form)
        answers = reference_answers(exact, PROMPTS, ANSWER)
        if min(margin for _, margin in answers) >= MIN_MARGIN:
            break
    expected = [tokens for tokens, _ in answers]
    options = {"model": str(stored), "dtype": "float32", "threads": 1, "page_size": 16}
    with pair(
        **options,
        engine="transformers",
        chunked_prefill_size=32,
        max_total_tokens=2048,
        max_context_tokens=512,
    ) as both:
        for first, split in ((1, False), (11, True), (21, True)):
            for room, prompt in enumerate(PROMPTS, first):
                both.ask(room, prompt, ANSWER, split)
            both.run_dry()
            assert [both.outputs[first + i].tokens for i in range(len(PROMPTS))] == expected
        both.settle(60.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "nvfp4"}, "expert_dtype is 'nvfp4'"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (
            {
                "quant_method": "gptq",
                "meta": {"quantizer": ["gptqmodel:5.0.0"]},
                "dynamic": {"+:.*down.*": {"bits": 8}},
            },
            "bits is 8",
        ),
        ({"quant_method": "gptq", "rotation": "hadamard"}, "rotation is 'hadamard'"),
        ({"quant_method": "gptq", "dynamic": {"-:lm_head": {}, "+:.*down.*": {"bits": 2}}}, "bits is 2"),
        ({"quant_method": "awq", "w_bit": 3}, "w_bit is 3"),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, "format is 'mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "quant_algo is 'FP8_PB_WO'"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"lm_head": {"quant_algo": "NVFP4_AWQ"}},
            },
            "quant_algo is 'NVFP4_AWQ'",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is '0 layouts'"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": None},
            "config_groups is '0 layouts'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"0": ["Linear"]},
            },
            "config_groups is {'0': ['Linear']}",
        ),
        (
            {
                **FORMATS["ct_int4"][0],
                "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}},
            },
            "location is 'input'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"0": {"weights": {"type": "int", "num_bits": 8, "symmetric": False}}},
            },
            "symmetric is False",
        ),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        check_model(LlamaConfig(quantization_config=settings))
    message = str(refused.value)
    assert named in message
    assert "; use a checkpoint without quantization_config, or with " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False},  # AutoRound's
        {"quant_method": "gptq", "dynamic": {"-:.*lm_head.*": {}, "+:.*down_proj.*": {"bits": 8}}},
        {
            **FORMATS["ct_int4"][0],
            "transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}},
        },
    ],
)
def test_a_format_that_is_read_passes_the_gate(settings: dict[str, Any]) -> None:
    check_model(GptOssConfig(quantization_config=settings))


def replaced(path: Path, suffix: str, new: torch.Tensor | None) -> None:
    """Change (None: remove) the first tensor with `suffix`."""
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        if names := sorted(name for name in tensors if name.endswith(suffix)):
            del tensors[names[0]]
            if new is not None:
                tensors[names[0]] = new
            save_file(tensors, file, metadata={"format": "pt"})
            return
    raise AssertionError(suffix)


@pytest.mark.parametrize(
    ("form", "suffix", "new", "problem"),
    [
        ("fp8", ".weight_scale_inv", None, "stored as F8_E4M3, without .weight_scale_inv"),
        ("fp8", ".weight_scale_inv", torch.ones(1, 1), r"scales are \(1, 1\) for a weight"),
        ("fp8", "proj.weight", None, "is there, but not model"),
        ("awq", ".scales", None, "is there, but not model"),
        (
            "fp8",
            "proj.weight",
            torch.ones(64, 64).bfloat16(),
            "has a scale, .weight_scale_inv, but is stored as",
        ),
        ("awq", ".scales", torch.ones(2, 8), r"scales are \(8, 2\)"),
        ("awq", ".scales", torch.ones(3, 64), "scales are of 3 groups of inputs, not 2"),
        ("awq", ".qzeros", torch.ones(2, 8), "packed integers are torch.float32"),
        ("gptq_desc_act", ".g_idx", torch.full((64,), 9), "inputs are in groups 9 to 9 of 2"),
        (
            "ct_int4_zeros",
            ".weight_packed",
            torch.zeros(64, 1).int(),
            "an output has 4 bytes of numbers, not",
        ),
        ("ct_int4", ".weight_g_idx", torch.full((64,), 9), "inputs are in groups 9 to 9 of 2"),
        ("ct_int4", ".weight_g_idx", torch.zeros(63), "64 inputs have 63 entries of g_idx"),
    ],
)
def test_an_incomplete_weight_is_a_config_error(
    form: str, suffix: str, new: torch.Tensor | None, problem: str, tmp_path: Path
) -> None:
    stored, _ = write("llama", tmp_path, 0, form)
    replaced(stored, suffix, new)
    with pytest.raises(ConfigError, match=problem) as refused:
        load_model(EngineConfig(str(stored)))
    assert "\n" not in str(refused.value)


def test_entries_of_g_idx_that_are_minus_1_are_none() -> None:
    weight = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    parts, exact = packed(4, symmetric=True)(weight)
    parts[".weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    got = packed_format(4).read(parts, torch.float32)
    assert got.dequantised().equal(torch.from_numpy(exact))


def test_a_weight_may_have_scales_of_groups_without_inputs() -> None:
    numbers = np.arange(64).reshape(8, 8) % 16
    parts = {
        ".qweight": pack(numbers, 4).T.contiguous(),
        ".qzeros": pack(np.full((2, 8), 7), 4),
        ".scales": torch.tensor([[0.5], [2.0]]).expand(2, 8).half(),
    }
    weight = gptq_format(4, -1, "each_less_one").read(parts, torch.float32)
    ((matrix,),) = weight.matrices
    assert matrix.by_inputs(32)[0].shape == (8, 1)  # type: ignore[attr-defined]
    assert weight.dequantised().equal(torch.from_numpy(numbers - 8) * 0.5)


@pytest.mark.parametrize(
    "scales",
    [
        torch.ones(8, 3).to(torch.float8_e8m0fnu),
        torch.ones(7, 2).to(torch.float8_e8m0fnu),
        torch.ones(8, 2),
    ],
    ids=["too many", "too few", "no powers"],
)
def test_scales_that_do_not_fit_pairs_of_fp4_are_refused(scales: torch.Tensor) -> None:
    parts = {".weight": torch.zeros(8, 32, dtype=torch.int8), ".weight_scale_inv": scales}
    with pytest.raises(ValueError, match=r"scales are torch.*for \(8, 32\) bytes"):
        fp8_format((128, 128), has_fp4=True).read(parts, torch.bfloat16)
    with pytest.raises(ValueError, match="scales are"):
        fp8_format((128, 128), has_fp4=False).read(parts, torch.bfloat16)


def test_an_mxfp4_scale_of_255_makes_numbers_that_are_none() -> None:
    codes, scales = torch.zeros(1, 2, 1, 16).byte(), torch.tensor([[[255], [127]]]).byte()
    weight = MXFP4.read({"_blocks": codes + 0x22, "_scales": scales}, torch.float32)
    assert weight[0, :, 0].isnan().all()
    assert weight[0, :, 1].eq(1).all()


def test_the_last_rows_are_in_a_block_that_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 32 to 39 of 40 are the first half of the third block. All rows are dequantised at once."""
    monkeypatch.setattr(base, "_ELEMENTS_AT_ONCE", 10_000)
    weight, block = np.random.default_rng(0).normal(size=(40, 48)).astype(np.float32), (16, 24)
    parts, exact = scaled(".weight_scale", block)(weight)
    got = scaled_format(".weight_scale", block).read(parts, torch.float32)
    assert got.dequantised().equal(torch.from_numpy(exact))
