"""Weights that stay stored on a GPU: what is computed with them, by the definition of the kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from engine import loader
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredTensor
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.cuda.coded_weights import FORMATS
from engine.cuda.decoder import FlashInferDecoder
from engine.cuda.module_replacements import keeps_stored_weights, register
from engine.cuda.stored_experts import StoredExperts, tiles_of
from engine.cuda.stored_product import Products, StoredProduct
from engine.loader import load_model
from engine.module_replacements import check_weight_dtype, takes_stored_weights
from tests.engine.cpu.test_experts import make_experts
from tests.engine.cpu.test_int8_weights import logits, share
from tests.support.flashinfer_stand_in import flashinfer_module
from tests.support.quantised_checkpoints import write
from tests.support.stored_weights import in_fp8, in_int4, in_mxfp4, in_nvfp4, stored_experts

FROM_WIDENED = 2.0
"""The difference of logits from transformers in float32 with the dequantised weights: at most so many times
that of the same modules with these weights in bfloat16."""


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "available", lambda: True)


def stored(*parts: object) -> StoredTensor:
    return StoredTensor([parts], torch.bfloat16, experts=False)


@pytest.mark.parametrize(
    "form", ["fp8", "fp8_blocks", "fp8_rows", "mxfp4", "nvfp4", "int4", "int4_rows", "int4_fine"]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (50, 416), (7, 32)])
def test_a_product_of_joined_weights_is_that_of_the_stored_numbers(
    form: str, outputs: int, inputs: int
) -> None:
    """q, k and v are one product."""
    torch.manual_seed(0)
    blocks = {"fp8": None, "fp8_blocks": (16, 128), "fp8_rows": (1, inputs)}
    groups = {"int4": 128, "int4_rows": inputs, "int4_fine": 32}
    made = [
        in_mxfp4(n, inputs)
        if form == "mxfp4"
        else in_nvfp4(n, inputs)
        if form == "nvfp4"
        else in_int4(n, inputs, groups[form])
        if form in groups
        else in_fp8(n, inputs, blocks[form])
        for n in (outputs, 16)
    ]
    kept: set[str] = set()
    product = Products(kept).of(torch.cat([stored(part) for _, part in made]))
    assert isinstance(product, StoredProduct)
    assert kept == {form.partition("_")[0]}
    x, bias = torch.randn(2, 5, inputs).bfloat16(), torch.randn(outputs + 16).bfloat16()
    weights = torch.cat([each for each, _ in made])
    want = x.double() @ weights.T
    size = x.double().abs() @ weights.abs().T
    rounded = 2**-8 if form in groups else 1e-6  # int4 to bfloat16
    assert ((product(x).double() - want).abs() <= rounded * size + 2**-8 * want.abs()).all()
    torch.testing.assert_close(product(x, bias), product(x) + bias)


def test_what_no_kernel_multiplies_is_dequantised() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 256).bfloat16()
    _, narrow = in_fp8(48, 256, (16, 96))
    _, one = in_fp8(48, 256, (16, 128))
    _, other = in_mxfp4(48, 256)
    two_formats = torch.cat([stored(one), stored(other)])
    int4 = in_int4(48, 256, 32)[1]
    others = (
        replace(int4, group_of=torch.randperm(256) // 32),
        replace(int4, codes=torch.randint(0, 256, (48, 256), dtype=torch.uint8), bits=8),
        in_int4(48, 256, 16)[1],
    )
    several = (narrow, *others)
    for weight in (*map(stored, several), two_formats, torch.randn(8, 256).bfloat16()):
        kept: set[str] = set()
        product = Products(kept).of(weight)
        assert not isinstance(product, StoredProduct)
        assert not kept
        dense = weight.dequantised() if isinstance(weight, StoredTensor) else weight
        assert torch.equal(product(x), nn.functional.linear(x, dense))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_number_that_is_nan_makes_its_output_nan(code: int) -> None:
    """The kernel does not know NaN: scales say it."""
    torch.manual_seed(0)
    numbers = torch.ones(48, 160).to(torch.float8_e4m3fn)
    numbers.view(torch.uint8)[5, 100] = numbers.view(torch.uint8)[9, 150] = code
    coded = FORMATS[0][1](ScaledMatrix(numbers, torch.rand(3, 2), (16, 128)))
    assert coded is not None
    assert coded.scales.isnan().nonzero().tolist() == [[5, 0], [9, 1]]


def test_a_scale_that_is_nan_makes_its_output_nan() -> None:
    torch.manual_seed(0)
    _, matrix = in_nvfp4(48, 160)
    matrix.scales.view(torch.uint8)[5, 7] = matrix.scales.view(torch.uint8)[9, 0] = 0x7F
    product = Products().of(stored(matrix))
    assert isinstance(product, StoredProduct)
    sums = product(torch.ones(1, 160).bfloat16())[0]
    assert sums.isnan().nonzero().flatten().tolist() == [5, 9]


def test_the_kernel_reads_nvfp4_in_blocks_of_32_inputs() -> None:
    assert not isinstance(Products().of(stored(in_nvfp4(16, 48)[1])), StoredProduct)


def test_the_kernel_reads_int4_in_blocks_of_32_inputs() -> None:
    assert not isinstance(Products().of(stored(in_int4(16, 48, 48)[1])), StoredProduct)
    assert isinstance(Products().of(stored(in_int4(16, 64, 64)[1])), StoredProduct)


def test_without_triton_weights_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "available", lambda: False)
    assert Products().stored(stored(in_mxfp4(16, 64)[1])) is None
    assert not keeps_stored_weights(EngineConfig("m", device="cuda"), torch.bfloat16)


def test_bfloat16_weights_can_be_asked_for_on_a_gpu() -> None:
    config = EngineConfig("m", device="cuda", weight_dtype="bfloat16")
    check_weight_dtype(config, torch.bfloat16)
    assert not takes_stored_weights(config, torch.bfloat16)
    with pytest.raises(ConfigError, match="weights are computed in float16"):
        check_weight_dtype(config, torch.float16)
    with pytest.raises(ConfigError, match="int8 is for device cpu, not cuda"):
        check_weight_dtype(EngineConfig("m", device="cuda", weight_dtype="int8"), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "dtype", "linear", "taken"),
    [
        ("cuda", torch.bfloat16, "auto", True),
        ("cuda:1", torch.float16, "auto", True),
        ("cuda", torch.float32, "auto", False),
        ("cuda", torch.bfloat16, "torch", False),
        ("cpu", torch.float32, "auto", False),
        ("cpu", torch.bfloat16, "torch", False),
        ("meta", torch.bfloat16, "auto", False),
    ],
)
def test_where_weights_stay_stored(device: str, dtype: torch.dtype, linear: str, taken: bool) -> None:
    assert takes_stored_weights(EngineConfig("m", device=device, linear=linear), dtype) == taken


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_each_pair_is_in_one_tile_of_its_expert(tokens: int, count: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(1, count))
    ids = data.draw(st.lists(st.permutations(range(count)), min_size=tokens, max_size=tokens))
    experts = torch.tensor([one[:chosen] for one in ids]).flatten()
    rows, tiles = tiles_of(experts, count)
    found = [
        (pair, expert)
        for expert, tile in zip(tiles.tolist(), rows.view(len(tiles), -1).tolist(), strict=True)
        for pair in tile
        if pair >= 0
    ]
    assert sorted(found) == list(enumerate(experts.tolist()))
    used = {expert for _, expert in found}
    assert set(tiles.tolist()) <= used | {-1}, "a tile without rows has no weights"
    same = tiles_of(torch.zeros_like(experts), count)
    assert (rows.shape, tiles.shape) == tuple(each.shape for each in same), "shapes depend on values"


@pytest.mark.parametrize("tokens", [1, 9, 200])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", "fp8"),
        ("gpt_oss", "mxfp4"),
        ("deepseek_v4", "mxfp4"),
        ("qwen3_moe", "nvfp4"),
        ("qwen3_moe", "int4"),
    ],
)
def test_experts_are_those_of_the_stored_numbers(tokens: int, family: str, form: str) -> None:
    experts, exact = stored_experts(make_experts, family, form)
    kept: set[str] = set()
    ours = StoredExperts.of(experts, Products(kept))
    assert ours is not None
    assert kept == {form}
    x, chosen = torch.randn(tokens, 64).bfloat16(), torch.rand(tokens, 5).topk(2).indices
    factors = torch.rand(tokens, 2).bfloat16()
    got, want = ours(x, chosen, factors).double(), exact(x.double(), chosen, factors.double())
    assert (got - want).norm() <= 0.01 * want.norm()
    assert StoredExperts.of(make_experts(torch.bfloat16, family=family), Products()) is None


def is_mixture(family: str) -> bool:
    return "moe" in family or family in ("mixtral", "deepseek_v3", "deepseek_v4", "gpt_oss")


REST = pytest.mark.oracle_full


@pytest.mark.covering
@pytest.mark.parametrize("with_flashinfer", [True, False])
@pytest.mark.parametrize(
    ("family", "form", "kept"),
    [
        pytest.param("qwen3", "fp8_wide", "fp8", marks=REST),
        ("qwen3-wide", "fp8_wide", "fp8"),
        ("qwen3_moe-wide", "fp8_wide", "fp8"),
        pytest.param("qwen2_moe-wide", "fp8_wide", "fp8", marks=REST),
        ("llama", "fp8", None),  # blocks of 24 inputs
        pytest.param("qwen3_moe", "fp8_wide", "fp8", marks=REST),
        pytest.param("mixtral", "fp8_wide", "fp8", marks=REST),
        ("deepseek_v3", "fp8_wide", "fp8"),
        ("gpt_oss", "mxfp4", "mxfp4"),
        ("deepseek_v4", "fp8_fp4", "fp8, mxfp4"),
        pytest.param("qwen3-wide", "awq", "int4", marks=REST),
        ("phi3", "gptq", "int4"),
        ("mixtral", "awq", "int4"),
        pytest.param("llama", "gptq_desc_act", None, marks=REST),
        ("qwen3", "gptq_v2", None),  # 8 bits
        ("gemma2", "ct_int4_zeros", "int4"),
        ("qwen3-wide", "modelopt_nvfp4", "nvfp4"),
        ("mixtral", "ct_nvfp4", "nvfp4"),
        pytest.param("qwen3", "modelopt_mixed", "fp8, nvfp4", marks=REST),
    ],
)
def test_logits_are_within_the_bound(
    family: str,
    form: str,
    kept: str | None,
    with_flashinfer: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, exact = write(family, tmp_path, 0, form)
    ids = np.random.default_rng(2).integers(0, 256, 60).tolist()
    model = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]

    def on_cuda(_config: EngineConfig, kept: set[str]) -> dict[str, object]:
        table: dict[str, object] = {}
        register(table, kept)
        return table

    package, mla = flashinfer_module() if with_flashinfer else (None, None)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(loader, "replacement_table", on_cuda)
    loaded = load_model(EngineConfig(str(directory), dtype="bfloat16"))
    assert ", ".join(loaded.kept) == (kept or "")
    stored_experts = [module for module in loaded.model.modules() if isinstance(module, StoredExperts)]
    assert bool(stored_experts) == (kept is not None and is_mixture(family))
    assert isinstance(loaded.model.model, FlashInferDecoder) == (with_flashinfer and "wide" in family)
    widened = share(logits(exact, ids, "auto", 1000), want)
    for chunk in (1000, 7):
        assert share(logits(directory, ids, "auto", chunk), want) <= FROM_WIDENED * widened
