"""Packs of fp8 and MXFP4: products against float64, and which weights are kept so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.checkpoint.stored import StoredMatrix, StoredWeights
from engine.cpu.experts import PackedExperts
from engine.cpu.linear import PackedLinear, Packer, PackFormat, check_packable
from engine.cpu.op import KernelsUnavailable, machine_isas, set_isa
from tests.engine.cpu.test_experts import make_experts

try:
    check_packable()
except KernelsUnavailable as error:
    pytest.skip(f"no packed products: {error}", allow_module_level=True)
ISAS = machine_isas()[1:]  # all but base
ROWS = [0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 70, 600]
SHAPES = [(48, 64), (50, 96), (7, 32), (128, 416), (32, 256)]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


def in_fp8(outputs, inputs, block):
    """Float64 weights, all numbers of e4m3 but NaN among them, and their format."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    numbers = codes.where(codes & 127 != 127, codes & 128).view(torch.float8_e4m3fn).double()
    high, wide = block or (outputs, inputs)
    scales = torch.rand(-(-outputs // high), -(-inputs // wide)) * 3e-3
    scales[0, 0] = 2.0**-9
    each = scales.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
    return numbers * each.double(), StoredMatrix("fp8", scales, (high, wide))


def in_mxfp4(outputs, inputs):
    """Float64 weights, and their format. Some blocks have no large numbers, and one none but zeros."""
    most = torch.randint(1, 9, (outputs, inputs // 32, 1))
    numbers = E2M1[(torch.rand(outputs, inputs // 32, 32) * most).long()]
    signs = torch.randint(0, 2, numbers.shape) * 2 - 1
    powers = torch.randint(-20, 8, (outputs, inputs // 32, 1))
    powers[0], numbers[-1, 0] = -90, 0
    return torch.ldexp(numbers * signs, powers).flatten(1).double(), StoredMatrix("mxfp4")


def layer_of(weights, stored, bias=False):
    """The packed layer, and the layer that it replaces, with weights rounded to bfloat16."""
    linear = nn.Linear(weights.shape[1], len(weights), bias=bias).bfloat16()
    linear.weight = nn.Parameter(weights.float().bfloat16())
    packer = Packer("auto", StoredWeights([(linear.weight, (stored,))]))
    return PackedLinear(linear, torch.float32, packer), linear


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("form", ["fp8", "fp8_blocks", "fp8_wide", "fp8_rows", "mxfp4"])
def test_products_are_those_of_the_stored_numbers(form, outputs, inputs, rows, isa):
    """Not those of weights rounded to bfloat16: a bound that these miss by far."""
    torch.manual_seed(rows)
    blocks = {"fp8": None, "fp8_blocks": (16, 128), "fp8_wide": (20, 256), "fp8_rows": (1, inputs)}
    weights, stored = in_mxfp4(outputs, inputs) if form == "mxfp4" else in_fp8(outputs, inputs, blocks[form])
    layer, linear = layer_of(weights, stored, bias=outputs == 48)
    assert layer.pack.form is (PackFormat.MXFP4 if form == "mxfp4" else PackFormat.FP8)
    x = torch.randn(rows, inputs).bfloat16()
    bias = linear.bias.double() if linear.bias is not None else torch.zeros(outputs).double()
    want, size = x.double() @ weights.T + bias, x.double().abs() @ weights.abs().T + bias.abs()
    assert ((layer(x).double() - want).abs() <= 1e-6 * size).all()


@pytest.mark.skipif("amx" not in ISAS, reason="this machine has no AMX")
def test_with_amx_the_sums_of_a_row_do_not_depend_on_the_batch():
    for weights, stored in (in_fp8(48, 416, (16, 128)), in_mxfp4(48, 416)):
        layer, _ = layer_of(weights, stored)
        x = torch.randn(40, 416).bfloat16()
        assert torch.equal(layer(x), torch.cat([layer(x[i : i + 1]) for i in range(40)]))


@pytest.mark.parametrize("value", [1e30, 3.14159, 2.0**-120])
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_weights_that_a_format_does_not_have_are_kept_in_bfloat16(form, value):
    torch.manual_seed(0)
    weights, stored = in_fp8(48, 128, (16, 128)) if form == "fp8" else in_mxfp4(48, 128)
    weights[5, 7] = value
    layer, linear = layer_of(weights, stored)
    assert layer.pack.form is PackFormat.BFLOAT16
    assert torch.equal(layer.pack.unpacked(torch.arange(48)), linear.weight)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(value, rows, isa):
    torch.manual_seed(0)
    for weights, stored in (in_fp8(48, 128, (16, 128)), in_mxfp4(48, 128)):
        x = torch.randn(rows, 128).bfloat16()
        x[-1, 100] = value
        layer, _ = layer_of(weights, stored)
        assert not layer(x)[-1].isfinite().any()
        assert layer(x)[:-1].isfinite().all()
        weights[7, 9] = value
        layer, _ = layer_of(weights, stored)
        assert not layer(torch.ones(rows, 128).bfloat16())[:, 7].isfinite().any()


def test_blocks_that_cut_what_shares_a_scale_are_kept_in_bfloat16():
    weights, stored = in_fp8(48, 256, (16, 96))
    layer, _ = layer_of(weights, stored)
    assert layer.pack.form is PackFormat.BFLOAT16


@pytest.mark.parametrize(
    ("weight_dtype", "form"), [("bfloat16", PackFormat.BFLOAT16), ("int8", PackFormat.INT8)]
)
def test_another_format_can_be_asked_for(weight_dtype, form):
    weights, stored = in_fp8(48, 128, None)
    linear = nn.Linear(128, 48, bias=False).bfloat16()
    linear.weight = nn.Parameter(weights.float().bfloat16())
    packer = Packer(weight_dtype, StoredWeights([(linear.weight, (stored,))]))
    assert PackedLinear(linear, torch.float32, packer).pack.form is form


def matrices_of(experts, name):
    """Views [outputs, inputs] of a parameter, in the order in which its formats are noted."""
    for expert in getattr(experts, name).data:
        view = expert.T if experts.is_transposed else expert
        if name == "down_proj":
            yield view
        else:  # gpt-oss' gates and ups alternate
            yield from (view[::2], view[1::2]) if experts.is_transposed else view.chunk(2)


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize(("family", "form"), [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")])
def test_experts_are_those_of_the_stored_numbers(family, form, tokens, isa):
    experts, exact = make_experts(torch.bfloat16, family=family), make_experts(torch.float64, family=family)
    known = []
    for name in ("gate_up_proj", "down_proj"):
        formats = []
        for view, exact_view in zip(matrices_of(experts, name), matrices_of(exact, name), strict=True):
            weights, stored = in_mxfp4(*view.shape) if form == "mxfp4" else in_fp8(*view.shape, (16, 128))
            view.copy_(weights.float().bfloat16())
            exact_view.copy_(weights)
            formats.append(stored)
        known.append((getattr(experts, name), tuple(formats) if form == "fp8" else (StoredMatrix("mxfp4"),)))
    x, chosen = torch.randn(tokens, 64).bfloat16(), torch.rand(tokens, 5).topk(2).indices
    factors = torch.rand(tokens, 2).bfloat16()
    got = PackedExperts(experts, Packer("auto", StoredWeights(known)))(x, chosen, factors).double()
    want = exact(x.double(), chosen, factors.double())
    assert (got - want).norm() <= 0.01 * want.norm()
