"""Decode steps of layers that keep a state, over the definitions of the GPU's kernels, in float32: tokens are
those of transformers.generate, and rows write only their slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.cuda.state_layers import DeltaSteps, Mamba2Steps, delta_steps, mamba2_steps
from engine.delta_forms import DELTA_NETS
from engine.loader import load_model
from engine.mamba2_forms import MAMBA2
from engine.module_replacements import replacement_table
from engine.replacement_table import ReplacementTable, apply_replacements
from engine.runner import ModelRunner
from engine.states import CONV, RECURRENT, PackedMixer
from tests.engine.conftest import PROMPTS
from tests.support.driver import Driver, pools_of
from tests.support.reference import reference_answers
from tests.support.tiny_models import make_tiny

FAMILIES = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"), Mamba2Steps),
    **dict.fromkeys(("bailing_hybrid", "glm5_next_text", "kimi_linear", "olmo_hybrid"), DeltaSteps),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), DeltaSteps),
}
OUTPUTS = 12


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_float32_equal_generate(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, 5)
    config = EngineConfig(str(path), dtype="float32", attention="torch", linear="torch", overlap=False)
    loaded = load_model(config)
    table: ReplacementTable = {
        **dict.fromkeys(DELTA_NETS, lambda mixer, _: delta_steps(mixer)),
        **dict.fromkeys(MAMBA2, lambda mixer, _: mamba2_steps(mixer)),
    }
    assert apply_replacements(loaded.model, config, table)
    mixers = [module.mixer for module in loaded.model.modules() if isinstance(module, PackedMixer)]
    assert {type(mixer) for mixer in mixers} == {FAMILIES[family]}
    runner = ModelRunner(loaded, pools_of(loaded, 16, 40), config)
    driver = Driver(runner, 40, 16)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, OUTPUTS, chunk=30, stagger=4)
    runner.close()
    want = [answer.tokens for answer in reference_answers(path, PROMPTS, OUTPUTS)]
    assert [lane.outputs for lane in lanes] == want


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
@torch.inference_mode()
def test_only_the_slots_of_rows_are_written(family: str, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_tiny(family, tmp_path, 0))
    names = (*DELTA_NETS, *MAMBA2)
    mixer = next(module for module in model.modules() if type(module).__name__ in names)
    layer = delta_steps(mixer) if family == "qwen3_next" else mamba2_steps(mixer)
    assert isinstance(layer, DeltaSteps | Mamba2Steps)
    shapes = {CONV: (mixer.conv_dim, mixer.conv_kernel_size)}
    shapes[RECURRENT] = (4, 16, 32) if family == "qwen3_next" else (8, 8, 12)
    states = {name: torch.randn(6, *shape) for name, shape in shapes.items()}
    before = {name: tensor.clone() for name, tensor in states.items()}
    layer.run(torch.randn(3, 64), states, torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3]))
    for name, tensor in states.items():
        assert [bool(x.ne(y).any()) for x, y in zip(tensor, before[name], strict=True)] == [
            *(False, True, False, True, False, True)
        ]


@pytest.mark.parametrize(("family", "kind"), [("qwen3_next", DeltaSteps), ("falcon_h1", Mamba2Steps)])
def test_what_is_replaced(family: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(family, tmp_path, 0)

    def on_cuda(dtype: torch.dtype, linear: str = "auto") -> int:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        config = EngineConfig(str(path), device="cuda", linear=linear)
        apply_replacements(model, config, replacement_table(config, set()))
        return sum(isinstance(module, kind) for module in model.modules())

    monkeypatch.setattr(triton_kernels, "available", lambda: True)
    assert on_cuda(torch.bfloat16) > 0
    assert on_cuda(torch.float32) == on_cuda(torch.bfloat16, "torch") == 0
    monkeypatch.setattr(triton_kernels, "available", lambda: False)
    assert on_cuda(torch.bfloat16) == 0


def test_a_mixer_that_the_kernels_do_not_compute_stays(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_tiny("qwen3_next", tmp_path, 0))
    mixer = next(module for module in model.modules() if type(module).__name__ in DELTA_NETS)
    assert delta_steps(mixer) is not None
    mixer.activation = "gelu"
    assert delta_steps(mixer) is None
    mixer.activation, mixer.conv_kernel_size = "silu", 9
    assert delta_steps(mixer) is None
    mixer.conv_kernel_size, mixer.head_v_dim = 4, 4096
    assert delta_steps(mixer) is None
