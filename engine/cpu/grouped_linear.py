"""DeepSeek-V4's projection of groups of heads, each by outputs of its own.

torch multiplies batches of transposed bfloat16 weights on a CPU, which takes many times as long as the packed
product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.cpu.linear import GROUP, Matrix, Packer, packable


def fusible(linear: Any) -> bool:
    """Whether PackedGroups computes this module."""
    return (
        packable(linear.weight)
        and linear.bias is None
        and linear.weight.shape[0] // linear.n_groups % GROUP == 0
    )


class PackedGroups(nn.Module):
    """Replaces a `fusible` DeepseekV4GroupedLinear. Sums are float32 and are rounded once."""

    def __init__(self, linear: Any, packer: Packer) -> None:
        super().__init__()
        self._groups: int = linear.n_groups
        outputs, inputs = linear.weight.shape
        self._pack = packer.pack(outputs, inputs, [Matrix(linear.weight)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., groups, inputs] -> [..., groups, outputs of a group]."""
        rows = x.reshape(-1, self._groups, self._pack.inputs)
        count = self._pack.rows // self._groups
        parts = [
            self._pack.product(rows[:, group], group * count, count, None, torch.bfloat16)
            for group in range(self._groups)
        ]
        return torch.stack(parts, dim=1).view(*x.shape[:-1], count)
