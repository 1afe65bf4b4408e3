"""Linear layers whose weights are packed once, as bfloat16 or int8. linear.h describes the format."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from engine.cpu.op import KernelsUnavailable, current_isa, kernels
from engine.cpu.threads import kernel_threads
from kvcache.buffers import allocate_private

GROUP = 16
"""The number of outputs in one line of a pack."""


def check_packable() -> None:
    """Raises KernelsUnavailable, with the reason, if this CPU cannot compute packed products."""
    if current_isa() == "base":
        raise KernelsUnavailable("packed linear layers need a CPU with AVX2")


def packable(weight: torch.Tensor) -> bool:
    """Whether a weight [outputs, inputs] can be packed."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 32 == 0


class Weights(ctypes.Structure):
    """`baton::Weights` in linear.h."""

    _fields_ = (("pack", ctypes.c_void_p), ("scales", ctypes.c_void_p))


class Pack:
    """A packed weight with `rows` outputs and `inputs` inputs, in huge pages of its own.

    `dtype` is torch.bfloat16, or torch.int8 with a float32 scale for each output (symmetric). Products with a
    pack of int8 round their left side, too (linear_int8.h).
    """

    def __init__(self, rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rows = rows
        self.inputs = inputs
        self.dtype = dtype
        groups = -(-rows // GROUP)
        self._output_bytes = 2 * inputs
        if dtype == torch.int8:
            self._output_bytes = kernels().baton_int8_padded_inputs(inputs)
        self._buffer = allocate_private(groups * GROUP * self._output_bytes)
        self._scales = torch.empty(groups * GROUP) if dtype == torch.int8 else None

    @property
    def address(self) -> int:
        """The address of the first line."""
        return self._buffer.tensor.data_ptr()

    def weights(self, first: int = 0) -> Weights:
        """The address of output `first`, a multiple of GROUP, and of its scale."""
        assert first % GROUP == 0
        scales = None if self._scales is None else self._scales.data_ptr() + 4 * first
        return Weights(self.address + first * self._output_bytes, scales)

    def put(self, weight: torch.Tensor, group: int = 0, step: int = 1) -> None:
        """Pack `weight` [outputs, inputs] into group `group` and every `step`-th group after it."""
        source = weight.detach().contiguous()
        assert packable(source)
        assert source.shape[1] == self.inputs
        shape, to = (source.data_ptr(), len(source), self.inputs), (group, step, kernel_threads())
        if self._scales is None:
            kernels().baton_pack(*shape, self.address, *to)
        else:
            kernels().baton_pack_int8(*shape, self.address, self._scales.data_ptr(), *to)

    def unpacked(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of outputs [n], int64, as bfloat16 [n, inputs]. Raises IndexError."""
        if any(not 0 <= output < self.rows for output in outputs.tolist()):
            raise IndexError(f"the outputs are 0 to {self.rows - 1}")
        outputs = outputs.contiguous()
        out = torch.empty(len(outputs), self.inputs, dtype=torch.bfloat16)
        weights = self.weights()
        kernels().baton_unpack(
            *(weights.pack, weights.scales, self.inputs, outputs.data_ptr(), len(outputs), out.data_ptr()),
            kernel_threads(),
        )
        return out

    def product(
        self,
        x: torch.Tensor,
        first: int,
        count: int,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """x [rows, inputs] bfloat16 times outputs [first, first + count) -> [rows, count].

        `first` is a multiple of GROUP; `bias` is float32 [count]. Sums are float32 and are rounded once, to
        `out_dtype`: float32 or bfloat16.
        """
        assert out_dtype in (torch.float32, torch.bfloat16)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), count, dtype=out_dtype)
        weights = self.weights(first)
        kernels().baton_linear(
            x.data_ptr(),
            x.stride(0),
            len(x),
            weights.pack,
            weights.scales,
            self.inputs,
            count,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_dtype == torch.bfloat16,
            kernel_threads(),
        )
        return out


class PackedLinear(nn.Module):
    """Replaces an nn.Linear with bfloat16 weights, which are kept in `weight_dtype` (a Pack's).

    The input is bfloat16; sums are float32 and are rounded to `out_dtype`.
    """

    def __init__(
        self,
        linear: nn.Linear,
        out_dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._out_dtype = out_dtype
        self.pack = Pack(linear.out_features, linear.in_features, weight_dtype)
        self.pack.put(linear.weight)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        out = self.pack.product(rows, 0, self.out_features, self._bias, self._out_dtype)
        return out.reshape(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """Replaces an nn.Embedding that is tied to a packed layer, whose pack holds the only copy."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self._pack = pack

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> bfloat16 [..., inputs]. Raises IndexError."""
        return self._pack.unpacked(ids.flatten()).reshape(*ids.shape, self._pack.inputs)
