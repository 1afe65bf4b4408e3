"""The fused decoder over FlashInfer's operators computes what transformers' layers do. The operators are
stand-ins by FlashInfer's manual, bound to its signatures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.backends.decode_attention import DecodeAttention
from engine.backends.flashinfer import FlashInferAttention
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.cuda.decoder import FlashInferDecoder, fusible
from engine.graphs import DecodeLimits
from engine.loader import LoadedModel, load_model
from engine.module_replacements import apply_replacements, replacement_table
from engine.runner import ModelRunner
from tests.engine.conftest import PROMPTS
from tests.support.driver import Driver, pools_of
from tests.support.eager_recorder import EagerRecorder
from tests.support.flashinfer_stand_in import flashinfer_layers, flashinfer_module
from tests.support.reference import reference_generate
from tests.support.tiny_models import FAMILIES, make_tiny
from tests.support.wide_models import DENSE, MIXTURES, make_wide

OUTPUTS = 16


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, mla = flashinfer_module()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)


def load(path: Path, dtype: str = "float32") -> tuple[LoadedModel, EngineConfig]:
    config = EngineConfig(str(path), dtype=dtype, attention="torch", linear="torch", overlap=False)
    return load_model(config), config


def fused(loaded: LoadedModel) -> FlashInferDecoder:
    prefix = loaded.model.base_model_prefix
    decoder = FlashInferDecoder(getattr(loaded.model, prefix))
    setattr(loaded.model, prefix, decoder)
    return decoder


@pytest.fixture(params=[False, True], ids=["flashinfer", "own"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether recorded steps are computed by our kernels' definitions."""
    monkeypatch.setattr(triton_kernels, "available", lambda: request.param)
    monkeypatch.setattr("engine.backends.decode_attention.DTYPES", (torch.float32,))
    return bool(request.param)


def check_tokens(path: Path, own: bool) -> None:
    """In chunks beside decode rows, and in recorded decode steps, of one row at the end."""
    loaded, config = load(path)
    fused(loaded)
    pools = pools_of(loaded, 16, 40)
    runner = ModelRunner(loaded, pools, config)
    runner.attention = flashinfer_layers(loaded, pools)
    assert isinstance(runner.attention.fixed(1, 1).full, DecodeAttention if own else FlashInferAttention)
    recorder = EagerRecorder()
    runner.record_decode(DecodeLimits(sequences=3, context_pages=10, rows=8), recorder)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, OUTPUTS, chunk=30, stagger=4)
    runner.close()
    assert [lane.outputs for lane in lanes] == [
        reference_generate(path, prompt, OUTPUTS)[0] for prompt in PROMPTS
    ]
    assert sum(step.replays for step in recorder.steps) > OUTPUTS
    assert next(step for step in recorder.steps if len(step.outputs.tokens) == 1).replays


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_tokens_in_float32_equal_generate(family: str, own: bool, tmp_path: Path) -> None:
    check_tokens(make_wide(family, tmp_path, 5), own)


def test_so_they_do_with_biases(own: bool, tmp_path: Path) -> None:
    config: Any = FAMILIES["llama"]()
    config.head_dim, config.attention_bias = 64, True
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    check_tokens(tmp_path, own)


def on_cuda(path: Path, dtype: torch.dtype, linear: str = "auto") -> dict[str, int]:
    """What is replaced of a model in `path` on CUDA."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    config = EngineConfig(str(path), device="cuda", linear=linear)
    replaced = apply_replacements(model, config, replacement_table(config, set()))
    assert isinstance(model.model, FlashInferDecoder) == bool(replaced)
    return replaced


def test_what_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_wide("qwen3", tmp_path, 0)
    assert on_cuda(path, torch.bfloat16) == {"Qwen3Model": 1}
    assert on_cuda(path, torch.float32) == {}
    assert on_cuda(path, torch.bfloat16, "torch") == {}
    assert on_cuda(make_tiny("qwen3", tmp_path, 0), torch.bfloat16) == {}, "no kernels for heads of 16"
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert on_cuda(path, torch.bfloat16) == {}


def test_what_it_does_not_compute_stays(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_wide("llama", tmp_path, 0)).model
    assert fusible(model)
    mlp = model.layers[1].mlp
    act, up = mlp.act_fn, mlp.up_proj
    mlp.act_fn = nn.ReLU()
    assert not fusible(model)
    mlp.act_fn, mlp.up_proj = act, nn.Linear(up.in_features, up.out_features)
    assert not fusible(model), "its MLP has a bias"
    mlp.up_proj = up
    model.config.head_dim = 80
    assert not fusible(model)
