"""GPTQ's zero points, which its two versions and GPTQModel store in three ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from engine.checkpoint.formats import stored_format
from engine.checkpoint.grouped import gptq_format
from tests.support.quantised_checkpoints import GROUP, gptq, pack

GPTQMODEL = {"quant_method": "gptq", "group_size": GROUP, "meta": {"quantizer": ["gptqmodel:5.0.0"]}}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_gptq_zero_point_of_0_is_stored_as_the_largest_number(bits: int) -> None:
    """The first version stores zero points less one, modulo 2^bits. With 0 a weight is number times scale."""
    in_word, largest = 32 // bits, 2**bits - 1
    numbers = np.arange(in_word * in_word).reshape(in_word, in_word) % 2**bits
    parts = {
        ".qweight": pack(numbers, bits).T.contiguous(),
        ".qzeros": pack(np.full((1, in_word), largest), bits),
        ".scales": torch.full((1, in_word), 0.5).half(),
    }
    weight = gptq_format(bits, -1, "each_less_one").read(parts, torch.float32)
    assert weight.dequantised().equal(torch.from_numpy(numbers) * 0.5)


def test_gptqmodel_stores_words_of_zero_points_less_a_word_of_ones() -> None:
    """The zero point 0 of the first output borrows from the second's. See convert_gptq_v2_to_v1_format."""
    numbers, zeros = np.full((8, 8), 9), np.array([[0, 5, 8, 1, 0, 0, 15, 3]])
    word = pack(zeros, 4).numpy().view(np.uint32) - np.uint32(0x11111111)
    parts = {
        ".qweight": pack(numbers, 4).T.contiguous(),
        ".qzeros": torch.from_numpy(word.view(np.int32)),
        ".scales": torch.ones(1, 8).half(),
    }
    settings = {"quant_method": "gptq", "group_size": -1, "meta": {"quantizer": ["gptqmodel:7.3.4"]}}
    form = stored_format(LlamaConfig(quantization_config=settings))
    assert form is not None
    weight = form.read(parts, torch.float32)
    assert weight.dequantised().equal(torch.from_numpy(numbers - zeros.T).float())


def test_gptq_weights_may_have_other_widths_than_the_config_says() -> None:
    weight = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    for bits in (4, 8):
        parts, exact = gptq(bits, True, 1)(weight)
        got = gptq_format(12 - bits, GROUP, "each_less_one").read(parts, torch.float32)
        assert got.dequantised().equal(torch.from_numpy(exact))


@pytest.mark.parametrize("config_bits", [4, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel_takes_ones_of_any_width_off_a_symmetric_zero_point(bits: int, config_bits: int) -> None:
    """Before 2026 it took off those of the config's width, whatever the weight's."""
    weight = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    parts, exact = gptq(bits, True, 2, symmetric=True)(weight)
    ones = np.uint32((2**32 - 1) // (2**config_bits - 1))
    parts[".qzeros"] = torch.from_numpy((parts[".qzeros"].numpy().view(np.uint32) - ones).view(np.int32))
    settings: dict[str, Any] = {
        **GPTQMODEL, "sym": True, "bits": config_bits, "dynamic": {"+:.*down_proj.*": {"bits": bits}},
    }  # fmt: skip
    form = stored_format(LlamaConfig(quantization_config=settings))
    assert form is not None
    assert form.read(parts, torch.float32).dequantised().equal(torch.from_numpy(exact))


def test_a_rule_for_weights_that_are_not_symmetric_counts() -> None:
    weight = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    parts, exact = gptq(4, True, 2)(weight)
    words = parts[".qzeros"].numpy().view(np.uint32) - np.uint32(0x11111111)
    parts[".qzeros"] = torch.from_numpy(words.view(np.int32))
    settings = {**GPTQMODEL, "sym": True, "dynamic": {"+:.*down_proj.*": {"sym": False}}}
    form = stored_format(LlamaConfig(quantization_config=settings))
    assert form is not None
    assert form.read(parts, torch.float32).dequantised().equal(torch.from_numpy(exact))
