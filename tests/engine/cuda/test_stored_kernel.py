"""The Triton kernel for stored weights, without a GPU: its results in Triton's interpreter, and its machine
code for each generation of GPUs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from engine.cuda.coded_weights import CodedWeights
from engine.cuda.stored_experts import tiles_of
from engine.cuda.stored_product import stored_product
from tests.support.triton_code import CAPABILITIES, MOST_SHARED_BYTES, compiled, interpreted, unspecialized

pytestmark = pytest.mark.kernels
FORMS = ["fp8", "mxfp4", "nvfp4", "int4", "int4_fine"]
CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
"""By compute capability, the instructions of tensor cores, which tiles of many rows must use."""


@pytest.fixture
def kernel() -> Any:
    """The kernel's module, interpreted."""
    interpreted()
    return importlib.import_module("engine.cuda.stored_kernel")


def weights(form: str, experts: int, outputs: int, inputs: int) -> CodedWeights:
    """All codes but NaN. Powers are such that numbers are normal in float16."""
    shape = (experts, outputs)
    if form == "fp8":
        codes = torch.randint(0, 256, (*shape, inputs), dtype=torch.uint8)
        codes = codes.where(codes & 127 != 127, codes & 128)
        return CodedWeights(codes, torch.rand(*shape, -(-inputs // 128)) * 0.01)
    codes = torch.randint(0, 256, (*shape, inputs // 2), dtype=torch.uint8)
    if form == "mxfp4":
        powers = torch.randint(120, 130, (*shape, inputs // 32), dtype=torch.uint8)
        return CodedWeights(codes, powers)
    if form == "nvfp4":
        scales = torch.randint(0, 256, (*shape, inputs // 16), dtype=torch.uint8)
        scales = scales.where(scales & 127 != 127, scales & 128)
        return CodedWeights(codes, scales, factors=torch.rand(*shape, 1) * 1e-4)
    scales = (torch.rand(*shape, -(-inputs // (32 if form == "int4_fine" else 128))) * 0.01).half()
    return CodedWeights(codes, scales, torch.randint(0, 16, scales.shape, dtype=torch.uint8))


def check(kernel: Any, x: torch.Tensor, coded: CodedWeights, *rest: Any) -> None:
    """The kernel's result is the definition's, up to the order of float32 sums."""
    *_, count = rest
    out = torch.full((count, coded.codes.shape[1]), torch.nan, dtype=x.dtype)
    kernel.launch(x, coded, *rest[:-1], out)
    want = stored_product(x, *coded, *rest)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=float(2e-3 * want.abs().mean()))


# The interpreter multiplies no bfloat16, so rows are float16 here.
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (50, 416), (7, 32)])
def test_results_are_those_of_the_definition(
    form: str, rows: int, outputs: int, inputs: int, kernel: Any
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * inputs)[:, :inputs].half()
    check(kernel, x, weights(form, 1, outputs, inputs), None, None, 1, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "divisor"), [(1, 2), (9, 2), (60, 1)])
def test_rows_meet_the_weights_of_their_experts(form: str, tokens: int, divisor: int, kernel: Any) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 64).half()
    pairs = tokens * divisor
    rows, tiles = tiles_of(torch.randint(0, 5, (pairs,)), 5)
    check(kernel, x, weights(form, 5, 48, 64), rows, tiles, divisor, pairs)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, which interprets
def test_nan_and_the_ends_of_the_range(kernel: Any) -> None:
    """2^-127 is lost in float16."""
    x = torch.eye(32).half()
    coded = weights("mxfp4", 1, 4, 32)
    coded.scales[0, :, 0] = torch.tensor([0, 115, 135, 255])
    check_same(kernel, x, coded)
    coded = weights("fp8", 1, 16, 32)
    codes = torch.arange(512).view(16, 32) % 256  # all of them
    coded.codes[0] = codes.where(codes & 127 != 127, 0)
    check_same(kernel, x, coded)
    coded = weights("nvfp4", 1, 128, 32)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 128, 2)  # all of them
    check_same(kernel, x, coded._replace(scales=scales.where(scales & 127 != 127, 0)))
    coded = weights("int4_fine", 1, 16, 32)
    coded.zeros[0, :, 0] = torch.arange(16)  # type: ignore[index]
    check_same(kernel, x, coded)


def check_same(kernel: Any, x: torch.Tensor, coded: CodedWeights) -> None:
    """One number a sum: nothing is rounded but by the result."""
    out = torch.zeros(len(x), coded.codes.shape[1], dtype=x.dtype)
    kernel.launch(x, coded, None, None, 1, out)
    want = stored_product(x, *coded, None, None, 1, len(x))
    assert torch.equal(out.isnan(), want.isnan())
    torch.testing.assert_close(out, want, rtol=1e-3, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["*bf16", "*fp16"])
@pytest.mark.parametrize(
    ("form", "grouped", "rows"),
    [
        ("fp8", False, 16),
        ("mxfp4", True, 128),
        ("nvfp4", False, 16),
        ("nvfp4", True, 64),
        ("fp8", True, 64),
        ("int4", False, 16),
        ("int4", False, 128),
        ("int4_fine", True, 64),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_becomes_machine_code(capability: int, form: str, grouped: bool, rows: int, dtype: str) -> None:
    scales = {"fp8": "*fp32", "mxfp4": "*u8", "nvfp4": "*u8"}.get(form, "*fp16")
    types = {"x": dtype, "codes": "*u8", "scales": scales, "out": dtype}
    types |= {"rows": "*i32", "experts": "*i32"} if grouped else {}
    types |= {"zeros": "*u8"} if scales == "*fp16" else {}
    types |= {"factors": "*fp32"} if form == "nvfp4" else {}
    scale_inputs = {"mxfp4": 32, "nvfp4": 16, "int4_fine": 32}.get(form, 128)
    made = compiled(
        "stored_kernel",
        "stored_product_kernel",
        [rows],
        types,
        {"SCALE_INPUTS": scale_inputs, "FORMAT": form.partition("_")[0], "GROUPED": grouped, "ROWS": rows},
        [name for name in ("rows", "experts", "zeros", "factors") if name not in types],
        ["x", "codes", "scales", "out", "inputs", "outputs", "x_stride"],
        capability,
    )
    assert made["shared"] <= MOST_SHARED_BYTES
    assert (CORES[capability] if rows > 16 else "mma.sync") in made["ptx"]
    assert "cp.async" in made["ptx"], "weights are loaded while others are multiplied"
    assert ".local" not in made["ptx"]
    assert not made["spilled"]


def test_the_number_of_rows_does_not_make_another_kernel() -> None:
    """Beyond the tile that is chosen for it: else steps of 512 and of 513 tokens would each wait once for
    seconds of compilation."""
    assert unspecialized("stored_kernel", "stored_product_kernel") == {"row_count"}
