"""Packs of fp8, MXFP4, NVFP4 and int4: products against float64, and which weights are kept so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.checkpoint.grouped import GroupedMatrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredMatrix, StoredTensor
from engine.cpu.experts import PackedExperts
from engine.cpu.linear import Matrix, PackedLinear, Packer, PackFormat
from engine.cpu.op import set_isa
from tests.engine.cpu.test_experts import make_experts
from tests.support.cpu_kernels import packing_isas
from tests.support.stored_weights import in_format, in_fp8, in_int4, in_mxfp4, in_nvfp4, stored_experts

ISAS = packing_isas()
ROWS = [0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 70, 600]
SHAPES = [(48, 64), (50, 96), (7, 32), (128, 416), (32, 256)]


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


FORMS = {
    "fp8": (lambda *shape: in_fp8(*shape, None), PackFormat.FP8),
    "fp8_blocks": (lambda *shape: in_fp8(*shape, (16, 128)), PackFormat.FP8),
    "fp8_wide": (lambda *shape: in_fp8(*shape, (20, 256)), PackFormat.FP8),
    "fp8_rows": (lambda *shape: in_fp8(*shape, (1, shape[1])), PackFormat.FP8),
    "mxfp4": (in_mxfp4, PackFormat.MXFP4),
    "nvfp4": (in_nvfp4, PackFormat.NVFP4),
    "int4": (lambda *shape: in_int4(*shape, 128), PackFormat.INT4_BY_128),
    "int4_rows": (lambda *shape: in_int4(*shape, shape[1]), PackFormat.INT4_BY_128),
    "int4_wide": (lambda *shape: in_int4(*shape, 256), PackFormat.INT4_BY_128),
    "int4_fine": (lambda *shape: in_int4(*shape, 32), PackFormat.INT4_BY_32),
    "int4_by_64": (lambda *shape: in_int4(*shape, 64), PackFormat.INT4_BY_32),
}


def layer_of(stored: StoredMatrix, bias=False, weight_dtype="auto"):
    """The packed layer, and the layer that it replaces."""
    outputs, inputs = stored.shape
    linear = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    weight = StoredTensor([[stored]], torch.bfloat16, experts=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(linear, torch.float32, Packer(weight_dtype)), linear


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_stored_numbers(form, outputs, inputs, rows, isa):
    """Not those of weights rounded to bfloat16: a bound that these miss by far."""
    torch.manual_seed(rows)
    make, pack_format = FORMS[form]
    weights, stored = make(outputs, inputs)
    layer, linear = layer_of(stored, bias=outputs == 48)
    if form in ("int4_fine", "int4_by_64") and stored.group >= inputs:
        pack_format = PackFormat.INT4_BY_128  # one scale is enough for all inputs
    assert layer.pack.form is pack_format
    x = torch.randn(rows, inputs).bfloat16()
    bias = linear.bias.double() if linear.bias is not None else torch.zeros(outputs).double()
    want, size = x.double() @ weights.T + bias, x.double().abs() @ weights.abs().T + bias.abs()
    if isinstance(stored, GroupedMatrix):  # a product of 16 + number, of which 16 + zero point is subtracted
        size += 48 * x.double().abs().sum(1, keepdim=True) * float(stored.scales.max())
    assert ((layer(x).double() - want).abs() <= 1e-6 * size).all()


@pytest.mark.skipif("amx" not in ISAS, reason="this machine has no AMX")
def test_with_amx_the_sums_of_a_row_do_not_depend_on_the_batch():
    for form in ("fp8", "mxfp4", "nvfp4", "int4"):
        layer, _ = layer_of(in_format(form, 48, 416)[1])
        x = torch.randn(40, 416).bfloat16()
        assert torch.equal(layer(x), torch.cat([layer(x[i : i + 1]) for i in range(40)]))


@pytest.mark.parametrize("power", [0, 20, 255])  # 2^-127, 2^-107, NaN
def test_powers_that_leave_the_range_of_bfloat16_are_kept_in_bfloat16(power):
    torch.manual_seed(0)
    _, stored = in_mxfp4(48, 128)
    stored.scales[5, 1] = power
    layer, linear = layer_of(stored)
    assert layer.pack.form.of_checkpoint is None
    unpacked = layer.pack.unpacked(torch.arange(48))
    assert torch.equal(unpacked.view(torch.int16), linear.weight.dequantised().view(torch.int16))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_numbers_that_are_nan_are_kept_in_bfloat16(code):
    torch.manual_seed(0)
    _, stored = in_fp8(48, 128, (16, 128))
    stored.numbers.view(torch.uint8)[5, 7] = code
    layer, _ = layer_of(stored)
    assert layer.pack.form.of_checkpoint is None
    sums = layer(torch.ones(1, 128).bfloat16())[0]
    assert sums.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_scales_that_are_nan_are_kept_in_bfloat16(code):
    torch.manual_seed(0)
    _, stored = in_nvfp4(48, 128)
    stored.scales.view(torch.uint8)[5, 7] = code
    layer, _ = layer_of(stored)
    assert layer.pack.form.of_checkpoint is None
    sums = layer(torch.ones(1, 128).bfloat16())[0]
    assert sums.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("rows", [1, 9])
def test_matrices_with_factors_of_their_own_are_one_pack(rows, isa):
    torch.manual_seed(0)
    made = [in_nvfp4(32, 160) for _ in range(2)]
    weights = [StoredTensor([[stored]], torch.bfloat16, experts=False) for _, stored in made]
    assert made[0][1].factor != made[1][1].factor
    pack = Packer().pack(64, 160, [Matrix(weight, 2 * i) for i, weight in enumerate(weights)])
    assert pack.form is PackFormat.NVFP4
    x, exact = torch.randn(rows, 160).bfloat16(), torch.cat([each for each, _ in made])
    difference = pack.product(x, 0, 64).double() - x.double() @ exact.T
    assert (difference.abs() <= 1e-6 * (x.double().abs() @ exact.abs().T)).all()


def test_int4_without_neighbouring_groups_and_8_bits_are_kept_in_bfloat16():
    torch.manual_seed(0)
    _, stored = in_int4(48, 128, 32)
    shuffled = replace(stored, group_of=torch.randperm(128) // 32)
    eight_bits = replace(stored, codes=torch.randint(0, 256, (48, 128), dtype=torch.uint8), bits=8)
    for each in (shuffled, eight_bits, in_int4(48, 96, 48)[1]):
        layer, linear = layer_of(each)
        assert layer.pack.form.of_checkpoint is None
        assert torch.equal(layer.pack.unpacked(torch.arange(48)), linear.weight.dequantised())


def test_a_matrix_that_must_be_widened_widens_those_beside_it():
    torch.manual_seed(0)
    stored = [in_fp8(32, 128, None)[1] for _ in range(2)]
    stored[1].numbers.view(torch.uint8)[3, 3] = 0x7F
    weights = [StoredTensor([[each]], torch.bfloat16, experts=False) for each in stored]
    pack = Packer().pack(64, 128, [Matrix(weight, 2 * i) for i, weight in enumerate(weights)])
    assert pack.form.of_checkpoint is None
    unpacked = torch.cat([weight.dequantised() for weight in weights])
    torch.testing.assert_close(pack.unpacked(torch.arange(64)), unpacked, rtol=0, atol=0, equal_nan=True)


def test_numbers_in_int8_are_kept_in_bfloat16():
    torch.manual_seed(0)
    numbers = torch.randint(-128, 128, (48, 128), dtype=torch.int8)
    layer, linear = layer_of(ScaledMatrix(numbers, torch.rand(48, 1), (1, 128)))
    assert layer.pack.form.of_checkpoint is None
    assert torch.equal(layer.pack.unpacked(torch.arange(48)), linear.weight.dequantised())


def test_matrices_of_two_formats_are_kept_in_bfloat16():
    torch.manual_seed(0)
    stored = [in_fp8(32, 128, None)[1], in_mxfp4(32, 128)[1]]
    weights = [StoredTensor([[each]], torch.bfloat16, experts=False) for each in stored]
    pack = Packer().pack(64, 128, [Matrix(weight, 2 * i) for i, weight in enumerate(weights)])
    assert pack.form.of_checkpoint is None
    assert torch.equal(
        pack.unpacked(torch.arange(64)), torch.cat([weight.dequantised() for weight in weights])
    )


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(value, rows, isa):
    torch.manual_seed(0)
    for form in ("fp8", "mxfp4", "nvfp4", "int4"):
        stored = in_format(form, 48, 128)[1]
        x = torch.randn(rows, 128).bfloat16()
        x[-1, 100] = value
        layer, _ = layer_of(stored)
        assert not layer(x)[-1].isfinite().any()
        assert layer(x)[:-1].isfinite().all()
    _, stored = in_fp8(48, 128, (16, 128))
    stored.scales[0, 0] = value
    sums = layer_of(stored)[0](torch.ones(rows, 128).bfloat16())
    assert not sums[:, :16].isfinite().any()
    assert sums[:, 16:].isfinite().all()
    _, stored = in_nvfp4(48, 128)
    stored.factor.fill_(value)
    assert not layer_of(stored)[0](torch.ones(rows, 128).bfloat16()).isfinite().any()


def test_blocks_that_cut_what_shares_a_scale_are_kept_in_bfloat16():
    _, stored = in_fp8(48, 256, (16, 96))
    layer, _ = layer_of(stored)
    assert layer.pack.form.of_checkpoint is None


@pytest.mark.parametrize(
    ("weight_dtype", "form"), [("bfloat16", PackFormat.BFLOAT16), ("int8", PackFormat.INT8)]
)
def test_another_format_can_be_asked_for(weight_dtype, form):
    layer, _ = layer_of(in_fp8(48, 128, None)[1], weight_dtype=weight_dtype)
    assert layer.pack.form is form


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "nvfp4"), ("qwen3_moe", "int4")],
)
def test_experts_are_those_of_the_stored_numbers(family, form, tokens, isa):
    experts, exact = stored_experts(make_experts, family, form)
    x, chosen = torch.randn(tokens, 64).bfloat16(), torch.rand(tokens, 5).topk(2).indices
    factors = torch.rand(tokens, 2).bfloat16()
    kept = set()
    got = PackedExperts(experts, Packer("auto", kept))(x, chosen, factors).double()
    assert kept == {form}
    want = exact(x.double(), chosen, factors.double())
    assert (got - want).norm() <= 0.01 * want.norm()
