"""Weights of int8: products against the definition, logits within a stated bound, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.cpu.experts import PackedExperts
from engine.cpu.linear import PackedLinear, check_packable
from engine.cpu.op import KernelsUnavailable, machine_isas, set_isa
from engine.loader import load_model
from tests.engine.cpu.test_experts import make_experts
from tests.support.driver import Driver, open_runner
from tests.support.tiny_models import FAMILIES, make_tiny

try:
    check_packable()
except KernelsUnavailable as error:
    pytest.skip(f"no packed products: {error}", allow_module_level=True)
ISAS = machine_isas()[1:]  # all but base
DENSE = [family for family in FAMILIES if family not in ("qwen3_moe", "mixtral", "qwen2_moe")]
"""In a mixture a router near a tie chooses other experts, so its logits have no bound."""
BOUND, DEMO_BOUND = 0.06, 0.03
"""Of the logits of tiny random models, and of the demo model: the length of the difference from bfloat16's,
as a share of the length of those. Both were set after measuring; the format makes most of it."""
LAW = 1.5  # tests/engine/test_oracle_bfloat16.py
DEMO = Path(__file__).parents[3] / "deploy" / "demo_model"
PAGE = 16


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The definition: [..., outputs, inputs] -> float64, multiples of an output's largest value / 127."""
    exact = weight.float()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (exact / scale).round().double() * scale.double()


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 33, 70])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(48, 64, True), (50, 96, False), (128, 160, False)])
def test_equals_the_product_with_rounded_weights(rows, outputs, inputs, bias, isa):
    torch.manual_seed(rows)
    linear = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    linear.weight.data[3] = 0
    linear.weight.data[4] *= 1000
    x = torch.randn(rows, inputs).bfloat16()
    want = x.double() @ rounded(linear.weight).T + (linear.bias.double() if bias else 0)
    got = PackedLinear(linear, torch.float32, torch.int8)(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_equal_experts_with_rounded_weights(family, isa):
    x, chosen = torch.randn(9, 64).bfloat16(), torch.rand(9, 5).topk(2).indices
    weights = torch.rand(9, 2).bfloat16()
    experts = make_experts(torch.bfloat16, family=family)
    got = PackedExperts(experts, torch.int8)(x, chosen, weights)
    exact: Any = experts.double()
    for parameter in (exact.gate_up_proj, exact.down_proj):
        by_output = parameter.data.transpose(1, 2) if experts.is_transposed else parameter.data
        by_output.copy_(rounded(by_output))
    torch.testing.assert_close(
        got.double(), exact(x.double(), chosen, weights.double()), rtol=0.02, atol=0.02
    )


def logits(path: Path, ids: list[int], weight_dtype: str) -> torch.Tensor:
    """Float32 [len(ids), vocab]."""
    pages = -(-len(ids) // PAGE)
    runner, _ = open_runner(path, PAGE, pages, "bfloat16", "auto", "auto", weight_dtype=weight_dtype)
    driver = Driver(runner, pages, PAGE)
    batch = driver.batch([(driver.add(ids), len(ids))])
    with torch.inference_mode():
        return runner.logits(batch, np.arange(len(ids))).float()


def share(got: torch.Tensor, want: torch.Tensor) -> float:
    """The length of the difference, as a share of the length of `want`."""
    return float((got - want).norm() / want.norm())


def transformers_logits(path: Path, ids: list[int], dtype: torch.dtype, int8: bool = False) -> torch.Tensor:
    """Float32 [len(ids), vocab], computed in `dtype`; `int8`: linear layers have the rounded weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)] if int8 else []:
        layer.weight = nn.Parameter(rounded(layer.weight.bfloat16()).to(dtype))  # a tied embedding stays
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("family", DENSE)
def test_logits_are_those_of_the_rounded_weights_and_within_the_bound(family, tmp_path):
    ids = np.random.default_rng(2).integers(0, 256, 120).tolist()
    path = make_tiny(family, tmp_path, 1)
    got = logits(path, ids, "int8")
    exact = transformers_logits(path, ids, torch.float32)
    its_rounding = share(transformers_logits(path, ids, torch.bfloat16), exact)
    assert share(got, transformers_logits(path, ids, torch.float32, int8=True)) <= LAW * its_rounding
    assert 0 < share(got, logits(path, ids, "auto")) <= BOUND


def test_the_demo_model_says_the_same(isa):
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("deploy/demo_model holds no weights")
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("What does os.getcwd do? " * 8).ids
    exact, got = logits(DEMO, ids, "auto"), logits(DEMO, ids, "int8")
    best = exact.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > DEMO_BOUND * exact.abs().max()
    assert share(got, exact) <= DEMO_BOUND
    assert clear.any()
    assert (got.argmax(-1) == exact.argmax(-1))[clear].all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float32"}, r"int8 is made of bfloat16, not of float32.*bfloat16"),
        ({"dtype": "bfloat16", "linear": "torch"}, r"torch's linear layers have no int8"),
        ({"dtype": "bfloat16", "device": "meta"}, r"for device cpu, not meta"),
    ],
)
def test_what_has_no_int8_is_refused(options, words, tmp_path):
    config = EngineConfig(str(make_tiny("llama", tmp_path, 0)), weight_dtype="int8", **options)
    with pytest.raises(ConfigError, match=f"engine.weight_dtype.*{words}"):
        load_model(config)


def test_a_cpu_without_packed_products_is_refused(tmp_path):
    config = EngineConfig(str(make_tiny("llama", tmp_path, 0)), dtype="bfloat16", weight_dtype="int8")
    set_isa("base")
    try:
        with pytest.raises(ConfigError, match=r"engine.weight_dtype.*AVX2"):
            load_model(config)
    finally:
        set_isa(ISAS[-1])


def test_int8_is_another_model_to_its_peers(tmp_path):
    path = str(make_tiny("llama", tmp_path, 0))
    prints = {load_model(EngineConfig(path, "bfloat16", kind)).spec.fingerprint for kind in ("auto", "int8")}
    assert len(prints) == 2
