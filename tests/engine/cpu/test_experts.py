"""Packed experts against transformers' module in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config, Gemma4TextConfig, GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.config import EngineConfig
from engine.cpu.experts import PackedExperts
from engine.cpu.module_replacements import CpuReplacements
from engine.cpu.op import current_isa, machine_isas, set_isa
from tests.support.cpu_kernels import packing_isas

packing_isas()  # skipped without any

FAMILIES = ["qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v4", "nemotron_h"]


def make_experts(dtype, inner=32, family="qwen3_moe", hidden=64):
    torch.manual_seed(0)
    if family == "gpt_oss":  # a limit that a third of the values exceed
        config = GptOssConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_local_experts=5,
            num_experts_per_tok=2,
            swiglu_limit=2.0,
        )
        kind = GptOssExperts
    elif family == "deepseek_v4":  # so does this one
        config = DeepseekV4Config(
            hidden_size=hidden,
            moe_intermediate_size=inner,
            n_routed_experts=5,
            num_experts_per_tok=2,
            swiglu_limit=1.0,
        )
        kind = DeepseekV4Experts
    elif family == "nemotron_h":
        config = NemotronHConfig(
            hidden_size=hidden, moe_intermediate_size=inner, n_routed_experts=5, num_experts_per_tok=2
        )
        kind = NemotronHExperts
    elif family == "gemma4_text":
        config = Gemma4TextConfig(
            hidden_size=hidden, moe_intermediate_size=inner, num_experts=5, top_k_experts=2
        )
        kind = Gemma4TextExperts
    else:
        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=inner, num_experts=5, num_experts_per_tok=2
        )
        kind = Qwen3MoeExperts
    config._experts_implementation = "eager"
    experts = kind(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts.to(torch.bfloat16).to(dtype).requires_grad_(False)


def drawn_tokens(count):
    """Hidden states, the chosen experts and their weights."""
    x = torch.randn(count, 64).bfloat16()
    return x, torch.rand(count, 5).topk(2).indices, torch.rand(count, 2).bfloat16()


@pytest.fixture(params=["avx2", "best"])
def isa(request):
    before = current_isa()
    set_isa(machine_isas()[-1] if request.param == "best" else request.param)
    yield
    set_isa(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("inner", [32, 160])  # one task of outputs for a thread, and several
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_experts(family, tokens, inner):
    x, chosen, weights = drawn_tokens(tokens)
    want = make_experts(torch.float64, inner, family)(x.double(), chosen, weights.double())
    got = PackedExperts(make_experts(torch.bfloat16, inner, family))(x, chosen, weights)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() <= 0.005 * want.norm()  # half of it is bfloat16's


def test_a_row_does_not_depend_on_the_batch():
    experts = PackedExperts(make_experts(torch.bfloat16))
    x, chosen, weights = drawn_tokens(9)
    together = experts(x, chosen, weights)
    for row in range(9):
        only = slice(row, row + 1)
        assert torch.equal(experts(x[only], chosen[only], weights[only])[0], together[row])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_that_is_none_stays_one(family):
    """The sampler must see it, and end that request alone."""
    x, chosen, weights = drawn_tokens(3)
    x[1, 5] = torch.nan
    out = PackedExperts(make_experts(torch.bfloat16, family=family))(x, chosen, weights)
    assert [bool(row.isnan().any()) for row in out] == [False, True, False]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_what_cannot_be_packed_is_left_alone(family):
    replacements, config = CpuReplacements(), EngineConfig("m")
    assert replacements.experts(make_experts(torch.float32, family=family), config) is None
    assert replacements.experts(make_experts(torch.bfloat16, 48, family), config) is None
    assert isinstance(replacements.experts(make_experts(torch.bfloat16, 32, family), config), PackedExperts)
