"""Tiny checkpoints in the formats of quantised weights that are loaded, and what their weights are.

A format quantises a weight to whole numbers, scales and zero points. From those, and not from how they are
packed, it computes in float32 what the weight is, as the format's documentation defines it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import make_tiny
from tests.support.wide_models import make_wide

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
Quantise = Callable[[Array], tuple[Tensors, Array]]
"""float32 [outputs, inputs] -> the stored tensors by the suffix of their names, and the weight they are."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ packs, from the lowest bits on, these eight neighbours into a word."""
GROUP = 32


def pack(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers [rows, n], at least 0 -> int32 [rows, n * bits / 32]."""
    count = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // count), dtype=np.uint32)
    for place, column in enumerate(order or range(count)):
        words |= numbers[:, column::count].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def fit(weight: Array, groups: Array, bits: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Numbers [outputs, inputs] from 0 on, scales (float16 values) and zero points [groups, outputs]."""
    count, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((count, len(weight)), np.float32), np.zeros((count, len(weight)), np.int64)
    numbers = np.zeros(weight.shape, np.int64)
    for group in range(count):
        inside = weight[:, groups == group]
        if symmetric:
            scales[group] = np.abs(inside).max(1) / (most // 2)
            zeros[group] = (most + 1) // 2
        else:
            low, high = np.minimum(inside.min(1), 0), np.maximum(inside.max(1), 0)
            scales[group] = (high - low) / most
            zeros[group] = np.clip(np.rint(-low / scales[group]), 1, most)
        scales[group] = scales[group].astype(np.float16)
        numbers[:, groups == group] = np.rint(inside / scales[group][:, None]) + zeros[group][:, None]
    return np.clip(numbers, 0, most), scales, zeros


def value(numbers: Array, scales: Array, zeros: Array, groups: Array) -> Array:
    """(number - zero point) * scale."""
    output, input_ = np.indices(numbers.shape)
    group = groups[input_]
    exact: Array = (numbers - zeros[group, output]).astype(np.float32) * scales[group, output]
    return exact


def neighbours(inputs: int) -> Array:
    return np.arange(inputs) // GROUP


def awq(weight: Array) -> tuple[Tensors, Array]:
    groups = neighbours(weight.shape[1])
    numbers, scales, zeros = fit(weight, groups, 4, symmetric=False)
    parts = {
        ".qweight": pack(numbers.T, 4, AWQ_ORDER),
        ".qzeros": pack(zeros, 4, AWQ_ORDER),
        ".scales": torch.from_numpy(scales).half(),
    }
    return parts, value(numbers, scales, zeros, groups)


def gptq(bits: int, desc_act: bool, version: int, symmetric: bool = False) -> Quantise:
    def quantise(weight: Array) -> tuple[Tensors, Array]:
        groups = neighbours(weight.shape[1])
        if desc_act:
            groups = np.random.default_rng(0).permutation(groups)
        numbers, scales, zeros = fit(weight, groups, bits, symmetric)
        parts = {
            ".qweight": pack(numbers, bits).T.contiguous(),
            ".qzeros": pack(zeros - (version == 1), bits),  # the first version stores one less
            ".scales": torch.from_numpy(scales).half(),
            ".g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return parts, value(numbers, scales, zeros, groups)

    return quantise


def packed(bits: int, symmetric: bool, shuffled: bool = False, one_group: bool = False) -> Quantise:
    """compressed-tensors' pack-quantized: signed numbers, stored plus half of their range."""

    def quantise(weight: Array) -> tuple[Tensors, Array]:
        groups = neighbours(weight.shape[1]) * (not one_group)
        if shuffled:
            groups = np.random.default_rng(0).permutation(groups)
        numbers, scales, zeros = fit(weight, groups, bits, symmetric)
        parts = {
            ".weight_packed": pack(numbers, bits),
            ".weight_scale": torch.from_numpy(scales.T.copy()).half(),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = pack(zeros, bits).T.contiguous()
        if shuffled:
            parts[".weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return parts, value(numbers, scales, zeros, groups)

    return quantise


def e4m3(code: int) -> float:
    """The value of an fp8 number with 4 bits of exponent (bias 7) and 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def scaled(suffix: str, block: tuple[int, int] | None, integers: bool = False) -> Quantise:
    """Numbers of 8 bits and a scale per block, which may be cut off at the end. None: one per output."""

    def quantise(weight: Array) -> tuple[Tensors, Array]:
        if weight.ndim == 3:  # of all experts
            each = [quantise(one) for one in weight]
            names = each[0][0]
            parts = {name: torch.stack([tensors[name] for tensors, _ in each]) for name in names}
            return parts, np.stack([values for _, values in each])
        high, wide = block or (1, weight.shape[1])
        scales = np.zeros((-(-weight.shape[0] // high), -(-weight.shape[1] // wide)), np.float32)
        most = 127 if integers else 448
        for i, j in np.ndindex(scales.shape):
            tile = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            scales[i, j] = np.abs(tile).max() / most
        rows, columns = np.indices(weight.shape)
        of_each = scales[rows // high, columns // wide]
        if integers:
            stored = torch.from_numpy(np.rint(weight / of_each)).to(torch.int8)
            decoded = stored.numpy().astype(np.float32)
        else:
            stored = torch.from_numpy(weight / of_each).to(torch.float8_e4m3fn)
            codes = stored.view(torch.uint8).numpy()
            decoded = np.array([e4m3(code) for code in range(256)], np.float32)[codes]
        return {".weight": stored, suffix: torch.from_numpy(scales)}, decoded * of_each

    return quantise


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def mxfp4(weight: Array) -> tuple[Tensors, Array]:
    """[experts, inputs, outputs] -> codes of 4 bits, the first of two in the low half, and powers of two."""
    by_output = weight.transpose(0, 2, 1)
    blocks = by_output.reshape(*by_output.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))).astype(np.int64) - 2
    powers = np.float32(2.0) ** exponents
    table = np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    codes = np.abs(blocks[..., None] / powers[..., None, None] - table).argmin(-1)
    exact = table[codes] * powers[..., None]
    parts = {
        "_blocks": torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)),
        "_scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return parts, exact.reshape(by_output.shape).transpose(0, 2, 1)


def one_scale(weight: Array) -> tuple[Tensors, Array]:
    """fp8 with a scale for the whole weight, and one for activations, which nothing reads."""
    scale = np.float32(np.abs(weight).max() / 448)
    stored = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn)
    scales = {".weight_scale_inv": torch.tensor(scale), ".activation_scale": torch.tensor(0.5)}
    return {".weight": stored, **scales}, stored.float().numpy() * scale


def powers_of_two(weight: Array) -> tuple[Tensors, Array]:
    """DeepSeek-V4's fp8: scales are E8M0, and have another name."""
    high, wide = 16, 24
    scales = np.zeros((-(-weight.shape[0] // high), -(-weight.shape[1] // wide)), np.float32)
    for i, j in np.ndindex(scales.shape):
        tile = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        scales[i, j] = np.exp2(np.ceil(np.log2(np.abs(tile).max() / 448)))
    rows, columns = np.indices(weight.shape)
    each = scales[rows // high, columns // wide]
    stored = torch.from_numpy(weight / each).to(torch.float8_e4m3fn)
    decoded = np.array([e4m3(code) for code in range(256)], np.float32)[stored.view(torch.uint8).numpy()]
    return {".weight": stored, ".scale": torch.from_numpy(scales).to(torch.float8_e8m0fnu)}, decoded * each


def pairs_of_fp4(weight: Array) -> tuple[Tensors, Array]:
    """DeepSeek-V4's experts: two codes in a byte, and a power of two for 32 inputs."""
    parts, exact = mxfp4(weight.T[None])
    codes = parts["_blocks"].flatten(2)[0].view(torch.int8)
    return {".weight": codes, ".scale": parts["_scales"][0].view(torch.float8_e8m0fnu)}, exact[0].T


def packed_mxfp4(weight: Array) -> tuple[Tensors, Array]:
    """As compressed-tensors stores it."""
    parts, exact = mxfp4(weight.T[None])
    pairs, powers = parts["_blocks"].flatten(2)[0], parts["_scales"][0]
    return {".weight_packed": pairs, ".weight_scale": powers}, exact[0].T


def nvfp4(weight: Array) -> tuple[Array, Array, np.float32, Array]:
    """Pairs of codes, e4m3 codes of scales [rows, inputs / 16], the factor of the weight, and its values."""
    blocks = weight.reshape(len(weight), -1, 16)
    most = np.abs(blocks).max(-1)
    factor = np.float32(most.max() / (6 * 448))
    stored = torch.from_numpy(most / 6 / factor).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    decoded = np.array([e4m3(code) for code in range(256)], np.float32)[stored]
    scales = decoded * factor
    table = np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    codes = np.abs(blocks[..., None] / np.maximum(scales, 1e-30)[..., None, None] - table).argmin(-1)
    pairs = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(len(weight), -1)
    return pairs, stored, factor, (table[codes] * scales[..., None]).reshape(weight.shape)


def _fp8_scales(codes: Array) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def modelopt_nvfp4(weight: Array) -> tuple[Tensors, Array]:
    """As NVIDIA's Model Optimizer stores it; what it knows of activations is not read."""
    pairs, scales, factor, exact = nvfp4(weight)
    parts = {".weight": torch.from_numpy(pairs), ".weight_scale": _fp8_scales(scales)}
    return {**parts, ".weight_scale_2": torch.tensor(factor), ".input_scale": torch.tensor(0.5)}, exact


def modelopt_mixed(weight: Array) -> tuple[Tensors, Array]:
    """Wide weights in NVFP4, others in fp8 with one scale."""
    if weight.shape[1] > weight.shape[0]:
        return modelopt_nvfp4(weight)
    parts, exact = one_scale(weight)
    stored = {".weight": parts[".weight"], ".weight_scale": parts[".weight_scale_inv"]}
    return {**stored, ".input_scale": torch.tensor(0.5)}, exact


def packed_nvfp4(weight: Array) -> tuple[Tensors, Array]:
    """As compressed-tensors stores it, whose factor divides: here a power of two, of which both are exact."""
    power = np.float32(np.exp2(np.ceil(np.log2(np.abs(weight).max() / (6 * 448)))))
    pairs, scales, _, exact = nvfp4(np.append(weight, np.full((1, weight.shape[1]), power * 6 * 448), 0))
    parts = {".weight_packed": torch.from_numpy(pairs[:-1]), ".weight_scale": _fp8_scales(scales[:-1])}
    factors = {".weight_global_scale": torch.tensor([1 / power]), ".input_global_scale": torch.tensor([2.0])}
    return {**parts, **factors}, exact[:-1]


def of_deepseek_v4(name: str) -> Quantise | None:
    """How the published checkpoints of DeepSeek-V4 store a weight; None: plain."""
    if ".ffn.experts." in name:
        return pairs_of_fp4
    of_attention = ("wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight")
    is_fp8 = ".shared_experts." in name or name.endswith(of_attention)
    return powers_of_two if is_fp8 else None


def published_v4(name: str) -> str:
    """The published name of what transformers saves as `name`."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens", "embed")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def write(family: str, directory: Path, seed: int, form: str) -> tuple[Path, Path]:
    """The tiny model (family, seed) in the format `form`, in two files, and in float32 as it then is.

    A family may end with "-wide": tests/support/wide_models.py.
    """
    settings, quantise = FORMATS[form]
    plain_name = family.removesuffix("-wide")
    make = make_tiny if plain_name == family else make_wide
    plain = make(plain_name, directory / "plain", seed)
    stored, exact = directory / f"{family}-{seed}-{form}", directory / f"{family}-{seed}-{form}-exact"
    if stored.is_dir():
        return stored, exact
    shutil.copytree(plain, exact)
    shutil.copytree(plain, stored)
    (stored / "model.safetensors").unlink()
    tensors: Tensors = {}
    weights: Tensors = load_file(plain / "model.safetensors")
    of_mixtral = ("w1.weight", "w2.weight", "w3.weight")
    suffix = "_proj" if quantise is mxfp4 else ("proj.weight", *of_mixtral)
    is_published_v4 = form == "fp8_fp4"
    for name, weight in sorted(weights.items()):
        if is_published_v4:
            chosen = of_deepseek_v4(name)
        else:
            chosen = quantise if ".layers." in name and name.endswith(suffix) else None
        if chosen is not None:
            parts, value_ = chosen(weight.numpy())
            stem = name.removesuffix(".weight")
            tensors |= {stem + part: tensor for part, tensor in parts.items()}
            weights[name] = torch.from_numpy(np.ascontiguousarray(value_))
        else:
            tensors[name] = weight
    save_file(weights, exact / "model.safetensors", metadata={"format": "pt"})
    if is_published_v4:
        tensors = {published_v4(name): tensor for name, tensor in tensors.items()}
    _save_in_two(tensors, stored)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return stored, exact


def _save_in_two(tensors: Tensors, path: Path) -> None:
    """Every other tensor in the second file, so that the tensors of one weight are in both."""
    places: dict[str, str] = {}
    for number in (0, 1):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[number::2]}
        save_file(part, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24], "activation_scheme": "dynamic"},
        scaled(".weight_scale_inv", (16, 24)),
    ),
    "fp8_wide": (  # blocks as wide as those of published checkpoints, which CPUs keep
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [16, 128],
            "activation_scheme": "dynamic",
        },
        scaled(".weight_scale_inv", (16, 128)),
    ),
    "fp8_fp4": (  # DeepSeek-V4's
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
            "weight_block_size": [16, 24],
            "activation_scheme": "dynamic",
        },
        powers_of_two,
    ),
    "fp8_static": (  # Ministral 3's
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        one_scale,
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, gptq(4, False, 1, True)),
    "gptq_desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        gptq(4, True, 1),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        gptq(8, False, 2),
    ),
    "ct_int4": (
        _compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=GROUP),
        packed(4, symmetric=True, shuffled=True),
    ),
    "ct_int4_zeros": (
        _compressed("pack-quantized", type="int", num_bits=4, strategy="channel", symmetric=False),
        packed(4, symmetric=False, one_group=True),
    ),
    "ct_int8": (
        _compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
        scaled(".weight_scale", None, integers=True),
    ),
    "ct_nvfp4": (
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        packed_nvfp4,
    ),
    "ct_mxfp4": (
        _compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        packed_mxfp4,
    ),
    "modelopt_nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "modelopt_mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4"},
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        },
        modelopt_mixed,
    ),
    "ct_fp8": (
        _compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        scaled(".weight_scale", None),
    ),
}
"""Name -> quantization_config and how a weight is quantised."""

OF_ONE_FAMILY = {"mxfp4": "gpt_oss", "fp8_fp4": "deepseek_v4"}
"""Formats of one family's weights alone."""
