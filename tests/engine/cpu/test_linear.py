"""Packed products against float64, for each instruction set that has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.cpu import op
from engine.cpu.linear import PackedEmbedding, PackedLinear, Packer
from engine.cpu.module_replacements import CpuReplacements
from engine.cpu.op import current_isa, set_isa
from engine.loader import load_model
from tests.support.cpu_kernels import packing_isas
from tests.support.tiny_configs import FAMILIES
from tests.support.tiny_models import write_tiny

ISAS = packing_isas()


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"), [(48, 64, True), (50, 96, False), (7, 32, True), (128, 160, False)]
)
def test_equals_the_product_in_float64(rows, outputs, inputs, bias, isa):
    torch.manual_seed(rows)
    linear = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    x = torch.randn(2, rows, inputs).bfloat16()[1:]
    want = nn.functional.linear(
        x.double(), linear.weight.double(), linear.bias.double() if linear.bias is not None else None
    )
    got = PackedLinear(linear, torch.float32)(x)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert torch.equal(PackedLinear(linear)(x), got.bfloat16())


@pytest.mark.parametrize("inputs", [288, 1056, 2048])
def test_rows_in_several_panels(inputs, isa):
    torch.manual_seed(inputs)
    linear = nn.Linear(inputs, 80, bias=False).bfloat16()
    x = torch.randn(1, 615, inputs).bfloat16()
    want = nn.functional.linear(x.double(), linear.weight.double())
    got = PackedLinear(linear, torch.float32)(x)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


@pytest.mark.skipif("amx" not in ISAS, reason="this machine has no AMX")
@pytest.mark.parametrize("rows", [2, 8, 9, 17, 40, 615])
def test_with_amx_the_sums_of_a_row_do_not_depend_on_the_batch(rows):
    linear = nn.Linear(1056, 80, bias=False).bfloat16()
    x = torch.randn(1, rows, 1056).bfloat16()
    packed = PackedLinear(linear, torch.float32)
    alone = torch.cat([packed(x[:, i : i + 1]) for i in range(rows)], 1)
    assert torch.equal(packed(x), alone)


def test_strided_input():
    linear = nn.Linear(32, 16, bias=False).bfloat16()
    wide = torch.randn(5, 96).bfloat16()
    x = wide[:, 32:64]
    torch.testing.assert_close(
        PackedLinear(linear, torch.float32)(x), nn.functional.linear(x.float(), linear.weight.float())
    )


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "int8"])
def test_an_embedding_reads_outputs_of_a_pack(weight_dtype):
    linear = nn.Linear(96, 50, bias=False).bfloat16()
    linear.weight.data = torch.randint(-127, 128, (50, 96)).bfloat16()
    linear.weight.data[:, 0] = 127  # the scales of int8 are 1
    embedding = PackedEmbedding(PackedLinear(linear, packer=Packer(weight_dtype)).pack)
    ids = torch.arange(50).flip(0).reshape(5, 10).T
    assert torch.equal(embedding(ids), nn.functional.embedding(ids, linear.weight))
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match="0 to 49"):
            embedding(torch.tensor([3, wrong]))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_held_once(tied, tmp_path):
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = tied
    write_tiny(config, tmp_path, 0)
    exact = load_model(EngineConfig(str(tmp_path), "bfloat16", linear="torch")).model.model.embed_tokens
    model = load_model(EngineConfig(str(tmp_path), "bfloat16")).model
    ids = torch.arange(config.vocab_size)
    assert torch.equal(model.model.embed_tokens(ids), exact(ids))
    assert len(list(model.model.embed_tokens.parameters())) == (0 if tied else 1)


def test_what_cannot_be_packed_is_left_alone():
    replacements = CpuReplacements()
    assert replacements.linear(nn.Linear(32, 16), EngineConfig("m")) is None  # float32
    assert replacements.linear(nn.Linear(40, 16).bfloat16(), EngineConfig("m")) is None  # not whole tiles
    assert replacements.linear(nn.Linear(32, 16).bfloat16(), EngineConfig("m", linear="torch")) is None


def test_insisting_on_packed_layers_where_the_cpu_has_none_is_refused():
    set_isa("base")
    try:
        with pytest.raises(ConfigError, match=r"^linear_backend.*AVX2"):
            CpuReplacements().linear(nn.Linear(32, 16).bfloat16(), EngineConfig("m", linear="packed"))
        assert CpuReplacements().linear(nn.Linear(32, 16).bfloat16(), EngineConfig("m")) is None
    finally:
        set_isa(ISAS[-1])


def test_an_instruction_set_that_does_not_exist_or_is_missing_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"BATON_CPU_ISA.*'sse9'.*unknown"):
        set_isa("sse9")
    monkeypatch.setattr(op, "machine_isas", lambda: ("base", "avx2"))
    with pytest.raises(ConfigError, match=r"BATON_CPU_ISA.*'amx': this machine does not have it.*base, avx2"):
        set_isa("amx")
    assert current_isa() == ISAS[-1]
