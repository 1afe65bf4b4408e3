"""Packs of bfloat16 whose exponents are coded: each bit is there, and products are those of the weights."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from engine.cpu.experts import PackedExperts
from engine.cpu.linear import (
    CODING_ISAS,
    Matrix,
    Pack,
    PackedEmbedding,
    PackedLinear,
    Packer,
    PackFormat,
)
from engine.cpu.op import set_isa
from tests.engine.cpu.test_experts import make_experts
from tests.engine.cpu.test_int8_weights import DEMO, logits
from tests.support.cpu_kernels import packing_isas

ISAS = packing_isas()
ROWS = [0, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 70, 600]
SHAPES = [(48, 64), (50, 96), (7, 32), (128, 416), (48, 256)]
RARE = 11
"""The most weights of a block whose upper bytes have no code (linear_coded.h: Patches)."""


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


@pytest.fixture
def coding_isa():
    """The best instruction set for which weights are coded."""
    available = [name for name in CODING_ISAS if name in ISAS]
    if not available:
        pytest.skip("this machine has no AVX-512, for which weights are coded")
    set_isa(available[-1])
    yield
    set_isa(ISAS[-1])


def noise(outputs: int, inputs: int) -> torch.Tensor:
    return (torch.randn(outputs, inputs) * 0.02).bfloat16()


def with_rare_numbers(weight: torch.Tensor, count: int = RARE) -> torch.Tensor:
    """Each of the first `count` inputs of output 0 gets an exponent of its own, outside those of noise."""
    weight = weight.clone()
    powers = 2.0 ** (4 * torch.arange(count) + 8)
    weight[0, :count] = powers * torch.where(torch.arange(count) % 2 == 0, 1.5, -1.25)
    return weight


def coded(weight: torch.Tensor) -> Pack:
    pack = Pack(*weight.shape, PackFormat.CODED_BFLOAT16)
    assert pack.put(Matrix(weight))
    return pack


def plain(weight: torch.Tensor) -> Pack:
    pack = Pack(*weight.shape)
    assert pack.put(Matrix(weight))
    return pack


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_weights(outputs, inputs, rows, isa):
    torch.manual_seed(rows)
    weight = noise(outputs, inputs)
    if rows % 2:
        weight = with_rare_numbers(weight)
    x = torch.randn(rows, inputs).bfloat16()
    got = coded(weight).product(x, 0, outputs).double()
    want, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    assert ((got - want).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_every_bit_comes_back(outputs, inputs):
    torch.manual_seed(0)
    weight = with_rare_numbers(noise(outputs, inputs), 8)
    special = [float("nan"), float("inf"), -0.0]
    weight[1, : len(special)] = torch.tensor(special).bfloat16()
    assert torch.equal(bits(coded(weight).unpacked(torch.arange(outputs))), bits(weight))


def test_weights_of_16_upper_bytes_need_no_patches():
    exponents = 2.0 ** (2 * torch.arange(8) - 8)
    weight = torch.cat([exponents, -exponents]).repeat(48, 16).bfloat16()
    assert torch.equal(coded(weight).unpacked(torch.arange(48)), weight)


@pytest.mark.parametrize("outputs", [[0], [5], [0, 3, 17, 47]])
def test_an_embedding_reads_outputs_of_a_pack(outputs):
    torch.manual_seed(0)
    weight = with_rare_numbers(noise(48, 256))
    got = PackedEmbedding(coded(weight))(torch.tensor(outputs))
    assert torch.equal(got, weight[outputs])


@pytest.mark.usefixtures("coding_isa")
def test_a_matrix_with_too_many_rare_numbers_is_packed_as_it_is():
    torch.manual_seed(0)
    weight = with_rare_numbers(noise(32, 256), RARE + 16 + 1)
    assert not Pack(32, 256, PackFormat.CODED_BFLOAT16).put(Matrix(weight))
    pack = Packer().pack(64, 256, [Matrix(noise(32, 256)), Matrix(weight, 2)])
    assert pack.form is PackFormat.BFLOAT16
    assert torch.equal(pack.unpacked(torch.arange(32, 64)), weight)


def test_weights_are_coded_where_few_rows_gain_by_it(isa):
    want = PackFormat.CODED_BFLOAT16 if isa in CODING_ISAS else PackFormat.BFLOAT16
    assert Packer().pack(48, 256, [Matrix(noise(48, 256))]).form is want
    assert Packer("bfloat16").pack(48, 256, [Matrix(noise(48, 256))]).form is PackFormat.BFLOAT16
    assert Packer("int8").pack(48, 256, [Matrix(noise(48, 256))]).form is PackFormat.INT8


def test_weights_whose_blocks_would_be_mostly_padding_are_not_coded(isa):
    assert Packer().pack(48, 160, [Matrix(noise(48, 160))]).form is PackFormat.BFLOAT16


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.usefixtures("coding_isa")
def test_matrices_share_a_pack(rows):
    """As gate and up projections do, group by group in turns."""
    torch.manual_seed(0)
    halves = [noise(32, 256), with_rare_numbers(noise(32, 256))]
    pack = Packer().pack(64, 256, [Matrix(half, i, 2) for i, half in enumerate(halves)])
    assert pack.form is PackFormat.CODED_BFLOAT16
    together = torch.stack([half.view(2, 16, 256) for half in halves], 1).reshape(64, 256)
    assert torch.equal(pack.unpacked(torch.arange(64)), together)
    x = torch.randn(rows, 256).bfloat16()
    torch.testing.assert_close(pack.product(x, 16, 32), plain(together[16:48]).product(x, 0, 32))


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value, rows, isa):
    torch.manual_seed(0)
    weight, x = noise(48, 256), torch.randn(rows, 256).bfloat16()
    weight[5, 7] = value
    sums = coded(weight).product(x, 0, 48)
    assert (~sums.isfinite()).any(0).nonzero().flatten().tolist() == [5]
    x[-1, 100] = value
    sums = coded(noise(48, 256)).product(x, 0, 48)
    assert not sums[-1].isfinite().any()
    assert sums[:-1].isfinite().all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.usefixtures("coding_isa")
def test_a_layer_with_a_bias(rows):
    torch.manual_seed(0)
    linear = nn.Linear(256, 48).bfloat16()
    layer = PackedLinear(linear, torch.float32)
    assert layer.pack.form is PackFormat.CODED_BFLOAT16
    x = torch.randn(rows, 256).bfloat16()
    torch.testing.assert_close(layer(x), linear.float()(x.float()))


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.usefixtures("coding_isa")
def test_experts_of_coded_weights_are_those_of_weights_as_they_are(tokens):
    torch.manual_seed(0)
    x, chosen = torch.randn(tokens, 256).bfloat16(), torch.rand(tokens, 5).topk(2).indices
    factors = torch.rand(tokens, 2).bfloat16()
    outputs = [
        PackedExperts(make_experts(torch.bfloat16, 256, hidden=256), Packer(name))(x, chosen, factors)
        for name in ("auto", "bfloat16")
    ]
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02 * float(outputs[1].abs().max()))


def test_the_demo_model_computes_the_same(isa):
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("deploy/demo_model holds no weights")
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("What does os.getcwd do? " * 8).ids
    for chunk in (1000, 7):
        got, plain = (logits(DEMO, ids, name, chunk) for name in ("auto", "bfloat16"))
        assert float((got - plain).norm() / plain.norm()) <= 0.004  # what bfloat16 rounds
