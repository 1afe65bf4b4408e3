"""Weights of few bits, packed into words of 32: AWQ, GPTQ, and compressed-tensors' pack-quantized.

In all three, weight = (number - zero point) * scale, with a zero point and a scale per group of inputs.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.checkpoint.base import Format, Parts, row_blocks, unpack

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word hold the number of each of its eight outputs."""


def awq_format(group_size: int) -> Format:
    """AutoAWQ's "gemm" layout: outputs are packed. `group_size` -1: all inputs."""
    return Format((".qweight", ".qzeros", ".scales"), partial(_awq, group_size=group_size))


def gptq_format(bits: int, group_size: int, zero_offset: int) -> Format:
    """AutoGPTQ's layout: inputs are packed. A zero point is what is stored plus `zero_offset`, modulo 2^bits.

    With desc_act the inputs of a group are not neighbours; `.g_idx` then says each input's group.
    """
    dequantise = partial(_gptq, bits=bits, group_size=group_size, zero_offset=zero_offset)
    return Format((".qweight", ".qzeros", ".scales"), dequantise, optional=(".g_idx",))


def packed_format(bits: int) -> Format:
    """compressed-tensors' pack-quantized: inputs are packed; numbers are stored plus 2^(bits - 1)."""
    parts = (".weight_packed", ".weight_scale", ".weight_shape")
    return Format(parts, partial(_packed, bits=bits), optional=(".weight_zero_point", ".weight_g_idx"))


def _awq(parts: Parts, dtype: torch.dtype, group_size: int) -> torch.Tensor:
    """qweight int32 [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""
    packed, scales = parts[".qweight"], parts[".scales"].float()
    zeros = unpack(parts[".qzeros"], 4, _AWQ_ORDER)
    inputs, outputs = len(packed), packed.shape[1] * 8
    groups = _neighbours(inputs, group_size)
    _check(scales, zeros, groups, outputs)
    weight = torch.empty(outputs, inputs, dtype=dtype)
    for part in row_blocks(inputs, outputs):
        numbers, group = unpack(packed[part], 4, _AWQ_ORDER), groups[part]
        weight[:, part] = ((numbers - zeros[group]) * scales[group]).T
    return weight


def _gptq(parts: Parts, dtype: torch.dtype, bits: int, group_size: int, zero_offset: int) -> torch.Tensor:
    """qweight int32 [inputs / n, outputs], qzeros [groups, outputs / n], scales [groups, outputs].

    n = 32 / bits.
    """
    packed, scales = parts[".qweight"], parts[".scales"].float()
    zeros = (unpack(parts[".qzeros"], bits) + zero_offset) & (2**bits - 1)
    in_word = 32 // bits
    inputs, outputs = len(packed) * in_word, packed.shape[1]
    groups = parts[".g_idx"].long() if ".g_idx" in parts else _neighbours(inputs, group_size)
    _check(scales, zeros, groups, outputs)
    weight = torch.empty(outputs, inputs, dtype=dtype)
    for part in row_blocks(inputs, outputs, in_word):
        numbers = unpack(packed[part.start // in_word : part.stop // in_word].T, bits)
        group = groups[part]
        weight[:, part] = (numbers - zeros[group].T) * scales[group].T
    return weight


def _packed(parts: Parts, dtype: torch.dtype, bits: int) -> torch.Tensor:
    """weight_packed int32 [outputs, inputs / n], weight_scale [outputs, groups] or [1], n = 32 / bits.

    A zero point is packed along the outputs, [outputs / n, groups]; without one it is 0.
    """
    packed, half = parts[".weight_packed"], 2 ** (bits - 1)
    outputs, inputs = parts[".weight_shape"].tolist()
    scales = parts[".weight_scale"].float()
    scales = (scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales).T
    zeros = torch.zeros(scales.shape)
    if ".weight_zero_point" in parts:
        zeros = unpack(parts[".weight_zero_point"].T, bits)[:, :outputs] - half
    groups = _neighbours(inputs, -(-inputs // len(scales)))
    if ".weight_g_idx" in parts:
        groups = parts[".weight_g_idx"].long()
    _check(scales, zeros, groups, outputs)
    weight = torch.empty(outputs, inputs, dtype=dtype)
    for part in row_blocks(outputs, inputs):
        numbers = unpack(packed[part], bits)[:, :inputs] - half
        weight[part] = (numbers - zeros[:, part][groups].T) * scales[:, part][groups].T
    return weight


def _neighbours(inputs: int, group_size: int) -> torch.Tensor:
    """The group of each input, if a group's inputs are neighbours. int64 [inputs]."""
    return torch.arange(inputs) // (group_size if group_size > 0 else inputs)


def _check(scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor, outputs: int) -> None:
    """Raises ValueError unless scales and zeros are [groups, outputs] and each input is in such a group."""
    shape = (len(scales), outputs)
    if tuple(scales.shape) != shape or tuple(zeros.shape) != shape:
        raise ValueError(f"scales are {tuple(scales.shape)}, zero points {tuple(zeros.shape)}, not {shape}")
    if not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
        raise ValueError(f"inputs are in groups {int(groups.min())} to {int(groups.max())} of {len(scales)}")
