"""The format of a checkpoint's weights by `quantization_config` in its config (engine/model_config.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.checkpoint.base import Format
from engine.checkpoint.grouped import StoredZeros, awq_format, gptq_format, packed_format
from engine.checkpoint.mxfp4 import MXFP4, MXFP4_PACKED
from engine.checkpoint.nvfp4 import MODELOPT, NVFP4_PACKED
from engine.checkpoint.scaled import Block, fp8_format, scaled_format
from engine.errors import UnsupportedModel

Settings = Mapping[str, Any]


def stored_format(config: Any) -> Format | None:
    """The format of a transformers config's checkpoint; None: weights are not quantised.

    compressed-tensors wrote `compression_config` until October 2024. Raises UnsupportedModel for a format
    that is not read, by the setting that says so.
    """
    settings = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not settings:
        return None
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise _refused("quant_method", method, _METHODS)
    return _METHODS[method](settings)


def _fp8(settings: Settings) -> Format:
    """Without a size of blocks a weight has one scale."""
    _one_of(settings, "fmt", ("e4m3",), default="e4m3")
    sizes = settings.get("weight_block_size")
    block = _block(sizes)
    if block is None and sizes is not None:
        raise _refused("weight_block_size", sizes, ("two sizes", None))
    return fp8_format(block, _one_of(settings, "expert_dtype", ("fp8", "fp4"), default="fp8") == "fp4")


def _mxfp4(settings: Settings) -> Format:
    del settings  # the format has no options
    return MXFP4


def _awq(settings: Settings) -> Format:
    """AutoAWQ's names, and those of llm-awq, from which it comes: `w_bit` and `q_group_size`.

    AutoRound writes `zero_point` false where all zero points are 8; they are stored nevertheless.
    """
    _one_of(settings, "w_bit" if "w_bit" in settings else "bits", (4,), default=4)
    _one_of(settings, "version", ("gemm", "GEMM"), default="gemm")
    return awq_format(int(settings.get("group_size", settings.get("q_group_size", 128))))


def _gptq(settings: Settings) -> Format:
    """`dynamic` has settings of some weights by patterns of their names; GPTQModel writes it."""
    bits = _one_of(settings, "bits", (4, 8), default=4)
    rules = [rule or {} for rule in (settings.get("dynamic") or {}).values()]
    for rule in rules:
        _one_of(rule, "bits", (4, 8), default=bits)
    if settings.get("rotation"):  # activations would have to be rotated, too
        raise _refused("rotation", settings["rotation"], (None,))
    checkpoint = _one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    zeros: StoredZeros = "each_less_one"
    if checkpoint == "gptq_v2":
        zeros = "exact"
    elif "gptqmodel" in str((settings.get("meta") or {}).get("quantizer")):
        zeros = "words_less_one"
        symmetric = bool(settings.get("sym"))
        if all(rule.get("sym", symmetric) for rule in rules) and symmetric:
            zeros = "middle"
        else:  # of another width some versions took off ones of the config's width, others of the weight's
            for rule in rules:
                _one_of(rule, "bits", (bits,), default=bits)
    return gptq_format(bits, int(settings.get("group_size", 128)), zeros)


def _compressed_tensors(settings: Settings) -> Format:
    """All groups of modules must be stored alike. What is done to activations is not computed."""
    stored = _one_of(settings, "format", tuple(_COMPRESSED))
    types, widths = _COMPRESSED[stored]
    _one_of(settings.get("sparsity_config") or {}, "format", ("dense",), default="dense")
    _check_transforms(settings.get("transform_config") or {})
    schemes = [group.get("weights") or {} for group in _groups(settings)]
    layouts = {
        (
            _one_of(scheme, "type", types),
            _one_of(scheme, "num_bits", widths),
            _block(scheme.get("block_structure")),
        )
        for scheme in schemes
    }
    if len(layouts) != 1:
        raise _refused("config_groups", f"{len(layouts)} layouts", ("one layout",))
    _, bits, block = layouts.pop()
    if stored == "pack-quantized":
        return packed_format(bits)
    if stored == "nvfp4-pack-quantized":
        return NVFP4_PACKED
    for scheme in schemes:
        _one_of(scheme, "symmetric", (True,), default=True)
    if stored == "mxfp4-pack-quantized":
        return MXFP4_PACKED
    for scheme in schemes:
        _one_of(scheme, "strategy", ("tensor", "channel", "block") if block else ("tensor", "channel"))
    return scaled_format(".weight_scale", block)


_COMPRESSED: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "pack-quantized": (("int",), (4, 8)),
    "float-quantized": (("float",), (8,)),
    "int-quantized": (("int",), (8,)),
    "nvfp4-pack-quantized": (("float",), (4,)),
    "mxfp4-pack-quantized": (("float",), (4,)),
    "naive-quantized": (("float", "int"), (8,)),  # the name of both before they had names of their own
}
"""compressed-tensors' format -> types and numbers of bits of its numbers."""


def _modelopt(settings: Settings) -> Format:
    """NVIDIA's Model Optimizer. Which of the two a weight has is read from its dtype."""
    algorithm = _one_of(settings, "quant_algo", (*_MODELOPT, "MIXED_PRECISION"))
    layers = settings.get("quantized_layers") if algorithm == "MIXED_PRECISION" else None
    for layer in (layers or {}).values():
        _one_of(layer, "quant_algo", _MODELOPT)
    return MODELOPT


_MODELOPT = ("FP8", "NVFP4", "W4A16_NVFP4")


def _groups(settings: Settings) -> list[Settings]:
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refused("config_groups", groups, ("a group of settings by its name",))
    return list(groups.values())


def _check_transforms(transforms: Settings) -> None:
    """Rotations of weights alone cancel out. Those of activations and of KV would have to be computed."""
    for scheme in (transforms.get("config_groups") or {}).values():
        for each in scheme.get("apply") or []:
            _one_of(each, "location", ("weight_input", "weight_output"))


_METHODS: dict[str, Callable[[Settings], Format]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


def _one_of(settings: Settings, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    value = settings.get(key, default)
    if value not in allowed:
        raise _refused(key, value, allowed)
    return value


def _block(sizes: Any) -> Block | None:
    if (
        isinstance(sizes, list | tuple)
        and len(sizes) == 2
        and all(isinstance(n, int) and n > 0 for n in sizes)
    ):
        return sizes[0], sizes[1]
    return None


def _refused(key: str, value: Any, supported: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"{key} is {value!r} in quantization_config of config.json, or in hf_quant_config.json: weights "
        "stored so are not read",
        f"use a checkpoint without quantization_config, or with {key} {' or '.join(map(str, supported))}",
    )
