"""Weights of 4 or 8 bits in groups of inputs: AWQ, GPTQ, and compressed-tensors' pack-quantized.

In all three, weight = (number - zero point) * scale, with a zero point and a scale for each group of an
output's inputs. Numbers are packed into words of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from engine.checkpoint.base import Format, Parts, row_blocks, unpack
from engine.checkpoint.stored import StoredTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word hold the number of each of its eight outputs."""

StoredZeros = Literal["exact", "each_less_one", "words_less_one", "middle"]
"""GPTQ's zero points: as they are, each less one modulo 2^bits, or less a word that has a one in each number:
there a zero point of 0 borrows from its neighbour, as GPTQModel writes it. "middle": all are 2^(bits - 1);
what is stored does not count, because GPTQModel may have taken off a word for another number of bits."""


@dataclass(frozen=True)
class GroupedMatrix:
    """A StoredMatrix: numbers from 0 on in `bits` 4 or 8, uint8 [outputs, inputs * bits / 8, rounded up].

    Of two numbers in a byte the first has the lower half. `scales` and `zeros`, uint8, are [outputs, groups].
    A group is `group` neighbouring inputs; else `group_of`, int64 [inputs], says the group of each.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    inputs: int
    bits: int
    group: int
    group_of: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.inputs

    def rows(self, rows: slice | torch.Tensor) -> GroupedMatrix:
        """Some of its outputs."""
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows])

    def columns(self, columns: slice) -> GroupedMatrix | None:
        """Neighbouring inputs; None if they begin or end within a byte, or a group of neighbours."""
        start, stop, per_byte = columns.start, columns.stop, 8 // self.bits
        if start % per_byte or (stop % per_byte and stop != self.inputs):
            return None
        codes = self.codes[:, start // per_byte : -(-stop // per_byte)]
        part = replace(self, codes=codes, inputs=stop - start)
        if self.group_of is not None:
            return replace(part, group_of=self.group_of[columns])
        if self.group >= self.inputs:
            return replace(part, group=stop - start)
        if start % self.group or (stop % self.group and stop != self.inputs):
            return None
        groups = slice(start // self.group, -(-stop // self.group))
        return replace(part, scales=self.scales[:, groups], zeros=self.zeros[:, groups])

    def owned(self) -> GroupedMatrix:
        """A copy."""
        codes, scales, zeros = (each.clone() for each in (self.codes, self.scales, self.zeros))
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def to(self, device: torch.device) -> GroupedMatrix:
        """The same on a device."""
        group_of = None if self.group_of is None else self.group_of.to(device)
        codes, scales, zeros = (each.to(device) for each in (self.codes, self.scales, self.zeros))
        return replace(self, codes=codes, scales=scales, zeros=zeros, group_of=group_of)

    def dequantise(self, into: torch.Tensor) -> None:
        """Write its numbers to a tensor of the same shape."""
        groups = self.group_of
        if groups is None:
            groups = torch.arange(self.inputs, device=self.codes.device) // self.group
        for part in row_blocks(*self.shape):
            numbers = self.codes[part]
            if self.bits == 4:
                numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
            zeros, scales = self.zeros[part].float(), self.scales[part].float()
            into[part] = (numbers[:, : self.inputs].float() - zeros[:, groups]) * scales[:, groups]

    def by_inputs(self, width: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales and zero points [outputs, inputs / width rounded up]: one for each `width` inputs.

        None if one is not enough for that.
        """
        if self.group_of is not None:
            return None
        count = -(-self.inputs // width)
        if self.group >= self.inputs:
            return self.scales.expand(-1, count), self.zeros.expand(-1, count)
        if self.group % width:
            return None
        times = self.group // width
        scales, zeros = (each.repeat_interleave(times, 1)[:, :count] for each in (self.scales, self.zeros))
        return scales, zeros


def awq_format(group_size: int) -> Format:
    """AutoAWQ's "gemm" layout: outputs are packed. `group_size` -1: all inputs."""
    return Format((".qweight", ".qzeros", ".scales"), partial(_awq, group_size=group_size), ".qweight", 4)


def gptq_format(bits: int, group_size: int, zeros: StoredZeros) -> Format:
    """AutoGPTQ's layout: inputs are packed.

    With desc_act the inputs of a group are not neighbours; `.g_idx` then says each input's group. By its
    length a weight may have another number of bits, 4 or 8, than `bits`.
    """
    read = partial(_gptq, bits=bits, group_size=group_size, stored_zeros=zeros)
    return Format((".qweight", ".qzeros", ".scales"), read, ".qweight", bits, optional=(".g_idx",))


def packed_format(bits: int) -> Format:
    """compressed-tensors' pack-quantized: inputs are packed; numbers are stored plus 2^(bits - 1)."""
    parts = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (".weight_zero_point", ".weight_g_idx")
    return Format(parts, partial(_packed, bits=bits), parts[0], bits, optional=optional)


def _awq(parts: Parts, dtype: torch.dtype, group_size: int) -> StoredTensor:
    """qweight int32 [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""
    packed = parts[".qweight"]
    inputs, outputs = len(packed), packed.shape[1] * 8
    groups = -(-inputs // group_size) if group_size > 0 else 1
    if len(parts[".scales"]) != groups:
        raise ValueError(f"scales are of {len(parts['.scales'])} groups of inputs, not {groups}")
    codes = torch.empty(outputs, -(-inputs // 2), dtype=torch.uint8)
    for part in row_blocks(inputs, outputs, 2):
        numbers = unpack(packed[part], 4, _AWQ_ORDER).T.to(torch.uint8)
        pairs = codes[:, part.start // 2 : -(-part.stop // 2)]
        pairs.copy_(numbers[:, ::2])
        pairs[:, : numbers.shape[1] // 2] |= numbers[:, 1::2] << 4
    zeros = unpack(parts[".qzeros"], 4, _AWQ_ORDER)
    return _stored(codes, parts[".scales"].T, zeros.T, inputs, 4, group_size, None, dtype)


def _gptq(
    parts: Parts, dtype: torch.dtype, bits: int, group_size: int, stored_zeros: StoredZeros
) -> StoredTensor:
    """qweight int32 [inputs / n, outputs], qzeros [groups, outputs / n], scales [groups, outputs].

    n = 32 / bits.
    """
    packed, group_of, scales = parts[".qweight"], parts.get(".g_idx"), parts[".scales"].T
    if group_of is not None and len(packed) * 32 in (len(group_of) * 4, len(group_of) * 8):
        bits = len(packed) * 32 // len(group_of)
    zeros = _zero_points(parts[".qzeros"], bits, stored_zeros)
    inputs = len(packed) * 32 // bits
    return _stored(_bytes(packed.T), scales, zeros.T, inputs, bits, group_size, group_of, dtype)


def _zero_points(words: torch.Tensor, bits: int, stored: StoredZeros) -> torch.Tensor:
    """int32 [groups, outputs / n] -> [groups, outputs], n = 32 / bits."""
    if stored == "words_less_one":
        words = words + (2**32 - 1) // (2**bits - 1)  # a one in each number; the sum carries
    zeros = unpack(words, bits)
    if stored == "each_less_one":
        zeros = zeros.add(1).bitwise_and(2**bits - 1)
    if stored == "middle":
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    return zeros


def _packed(parts: Parts, dtype: torch.dtype, bits: int) -> StoredTensor:
    """weight_packed int32 [outputs, inputs / n], weight_scale [outputs, groups] or [1], n = 32 / bits.

    A zero point is packed along the outputs, [outputs / n, groups]; without one it is 0. weight_g_idx that is
    all -1 is none.
    """
    outputs, inputs = parts[".weight_shape"].tolist()
    scales = parts[".weight_scale"]
    scales = scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales
    zeros = torch.full(scales.shape, 2 ** (bits - 1))
    if ".weight_zero_point" in parts:
        zeros = unpack(parts[".weight_zero_point"].T, bits).T[:outputs]
    group_of, group_size = parts.get(".weight_g_idx"), -(-inputs // scales.shape[1])
    if group_of is not None and group_of.eq(-1).all():
        group_of = None
    return _stored(_bytes(parts[".weight_packed"]), scales, zeros, inputs, bits, group_size, group_of, dtype)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, 4 n]; the numbers of a word begin in its lowest bits."""
    return words.contiguous().view(torch.uint8)


def _stored(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    inputs: int,
    bits: int,
    group_size: int,
    group_of: torch.Tensor | None,
    dtype: torch.dtype,
) -> StoredTensor:
    """Raises ValueError unless each input has a code, and a group of which there are scales and zeros,
    [outputs, groups]."""
    group = group_size if 0 < group_size < inputs else inputs
    neighbours = torch.arange(inputs) // group
    groups = neighbours if group_of is None else group_of.long()
    nbytes, shape = -(-inputs * bits // 8), (len(codes), scales.shape[-1])
    if codes.shape[1] < nbytes:
        raise ValueError(f"an output has {codes.shape[1]} bytes of numbers, not {nbytes}")
    if tuple(scales.shape) != shape or tuple(zeros.shape) != shape:
        raise ValueError(f"scales are {tuple(scales.shape)}, zero points {tuple(zeros.shape)}, not {shape}")
    if groups.shape != (inputs,):
        raise ValueError(f"{inputs} inputs have {len(groups)} entries of g_idx")
    if not 0 <= int(groups.min()) <= int(groups.max()) < shape[1]:
        raise ValueError(f"inputs are in groups {int(groups.min())} to {int(groups.max())} of {shape[1]}")
    other = None if groups.equal(neighbours) else groups
    if other is None:  # a checkpoint may have scales of groups without inputs
        scales, zeros = (each[:, : int(groups[-1]) + 1] for each in (scales, zeros))
    scales, zeros = scales.contiguous(), zeros.to(torch.uint8).contiguous()
    matrix = GroupedMatrix(codes[:, :nbytes], scales, zeros, inputs, bits, group, other)
    return StoredTensor([[matrix]], dtype, experts=False)
