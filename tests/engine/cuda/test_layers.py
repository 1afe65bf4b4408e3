"""Norms and MLPs over FlashInfer's operators compute what transformers' modules do. The operators are
stand-ins by FlashInfer's manual, bound to its signatures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.cuda.layers import (
    FlashInferMLP,
    FlashInferNorm,
    fusible_mlp,
    has_weight,
)
from engine.layer_classes import MLPS, NORMS, NORMS_PLUS_ONE
from engine.loader import load_model
from engine.module_replacements import replacement_table
from engine.replacement_table import ReplacementTable, apply_replacements
from engine.runner import ModelRunner
from tests.engine.conftest import PROMPTS
from tests.support.driver import Driver, pools_of
from tests.support.flashinfer_stand_in import flashinfer_module
from tests.support.reference import reference_answers
from tests.support.tiny_models import make_tiny

REPLACED = {
    "deepseek_v2": {"DeepseekV2RMSNorm", "DeepseekV2MLP"},
    "deepseek_v3": {"DeepseekV3RMSNorm", "DeepseekV3MLP"},
    "deepseek_v32": {"DeepseekV32RMSNorm", "DeepseekV32MLP"},
    "gemma2": {"Gemma2RMSNorm", "Gemma2MLP"},
    "gemma3_text": {"Gemma3RMSNorm", "Gemma3MLP"},
    "gemma4_text": {"Gemma4RMSNorm", "Gemma4TextMLP"},
    "gpt_oss": {"GptOssRMSNorm"},
    "phi3": {"Phi3RMSNorm"},
    "falcon_h1": {"FalconH1RMSNorm"},
    "lfm2": {"Lfm2RMSNorm"},
    "qwen3_5_text": {"Qwen3_5RMSNorm", "Qwen3_5MLP"},
    "qwen3_5_moe_text": {"Qwen3_5MoeRMSNorm", "Qwen3_5MoeMLP"},
    "qwen3_next": {"Qwen3NextRMSNorm", "Qwen3NextMLP"},
}
OUTPUTS = 12


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, mla = flashinfer_module()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)


@pytest.mark.parametrize("family", REPLACED)
def test_tokens_in_float32_equal_generate(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, 5)
    config = EngineConfig(str(path), dtype="float32", attention="torch", linear="torch", overlap=False)
    loaded = load_model(config)

    def replaced(norm: Any, _: EngineConfig) -> FlashInferNorm | None:
        return FlashInferNorm(norm) if has_weight(norm) else None

    table: ReplacementTable = dict.fromkeys((*NORMS, *NORMS_PLUS_ONE), replaced)
    table |= {name: lambda mlp, _: FlashInferMLP(mlp) for name in MLPS}
    assert set(apply_replacements(loaded.model, config, table)) == REPLACED[family]
    runner = ModelRunner(loaded, pools_of(loaded, 16, 40), config)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, OUTPUTS, chunk=30, stagger=4)
    runner.close()
    want = [answer.tokens for answer in reference_answers(path, PROMPTS, OUTPUTS)]
    assert [lane.outputs for lane in lanes] == want


@pytest.mark.parametrize("family", ["gemma2", "gemma4_text"])
def test_what_is_replaced(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(family, tmp_path, 0)

    def on_cuda(dtype: torch.dtype, linear: str = "auto") -> set[str]:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        config = EngineConfig(str(path), device="cuda", linear=linear)
        return set(apply_replacements(model, config, replacement_table(config, set())))

    assert on_cuda(torch.bfloat16) == REPLACED[family]
    assert on_cuda(torch.float32) == set()
    assert on_cuda(torch.bfloat16, "torch") == set()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert on_cuda(torch.bfloat16) == set()


def test_an_mlp_that_it_does_not_compute_stays(tmp_path: Path) -> None:
    mlp = AutoModelForCausalLM.from_pretrained(make_tiny("gemma2", tmp_path, 0)).model.layers[0].mlp
    assert fusible_mlp(mlp)
    up = mlp.up_proj
    mlp.up_proj = torch.nn.Linear(up.in_features, up.out_features)
    assert not fusible_mlp(mlp)
    mlp.up_proj, mlp.act_fn = up, torch.nn.ReLU()
    assert not fusible_mlp(mlp)
