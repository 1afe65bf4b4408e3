"""Linear layers whose bfloat16 weights are packed once for the CPU. linear.h describes the format."""

from __future__ import annotations

import torch
from torch import nn

from engine.cpu.op import KernelsUnavailable, current_isa, kernels
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


class Pack:
    """A packed weight with `rows` outputs and `inputs` inputs, in huge pages of its own."""

    def __init__(self, rows: int, inputs: int) -> None:
        self.rows = rows
        self.inputs = inputs
        groups = -(-rows // GROUP)
        self._buffer = allocate_private(groups * GROUP * inputs * 2)

    @property
    def address(self) -> int:
        """The address of the first line."""
        return self._buffer.tensor.data_ptr()

    def put(self, weight: torch.Tensor, group: int = 0, step: int = 1) -> None:
        """Pack `weight` [outputs, inputs] into group `group` and every `step`-th group after it."""
        source = weight.detach().contiguous()
        assert packable(source)
        assert source.shape[1] == self.inputs
        kernels().baton_pack(
            source.data_ptr(), len(source), self.inputs, self.address, group, step, torch.get_num_threads()
        )

    def product(
        self, x: torch.Tensor, first: int, count: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [rows, inputs] bfloat16 times outputs [first, first + count) -> float32 [rows, count].

        `first` is a multiple of GROUP; `bias` is float32 [count].
        """
        assert first % GROUP == 0
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), count)
        kernels().baton_linear(
            x.data_ptr(),
            x.stride(0),
            len(x),
            self.address + 2 * first * self.inputs,
            self.inputs,
            count,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class PackedLinear(nn.Module):
    """Replaces an nn.Linear. Weights and input are bfloat16; sums are float32 and rounded to `out_dtype`."""

    def __init__(self, linear: nn.Linear, out_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._out_dtype = out_dtype
        self._pack = Pack(linear.out_features, linear.in_features)
        self._pack.put(linear.weight)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, self.in_features)
        out = self._pack.product(rows, 0, self.out_features, self._bias)
        return out.to(self._out_dtype).reshape(*x.shape[:-1], self.out_features)
