"""Packed projections of groups against transformers' module."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from engine.config import EngineConfig
from engine.cpu.grouped_linear import PackedGroups
from engine.cpu.module_replacements import CpuReplacements
from tests.support.cpu_kernels import packing_isas

packing_isas()  # skipped without any


def grouped(groups: int, inputs: int, outputs: int) -> DeepseekV4GroupedLinear:
    torch.manual_seed(0)
    linear = DeepseekV4GroupedLinear(inputs, groups * outputs, groups)
    return linear.bfloat16().requires_grad_(False)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize(("groups", "inputs", "outputs"), [(1, 32, 16), (4, 96, 48)])
def test_each_group_goes_through_its_own_outputs(groups: int, inputs: int, outputs: int, tokens: int) -> None:
    linear = grouped(groups, inputs, outputs)
    ours = CpuReplacements().grouped(linear, EngineConfig("m"))
    assert isinstance(ours, PackedGroups)
    x = torch.randn(1, tokens, groups, inputs).bfloat16()
    want = linear.double()(x.double())
    got = ours(x)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 16), (32, 8)])
def test_what_cannot_be_packed_is_left_alone(inputs: int, outputs: int) -> None:
    assert CpuReplacements().grouped(grouped(2, inputs, outputs), EngineConfig("m")) is None
