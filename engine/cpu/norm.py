"""Norms on a CPU, for the layers that no fused decoder computes.

transformers' norm is eight operators, which in a decode step take longer to call than to compute. Gated MLPs
as one C++ call were tried, too, as a mixture of one expert: with Gemma 4 E2B's widths a step took 4% longer.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from engine.cpu.linear import GROUP
from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.decoder_parts import norm_eps, norm_weight


class NormCall(ctypes.Structure):
    """`baton::norm::Call` in norm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "stride")),
        ("weight", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class CpuNorm(nn.Module):
    """Replaces one of NORMS or NORMS_PLUS_ONE (engine/layer_classes.py). It rounds once."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._scale = norm_weight(norm).contiguous()
        self._library = kernels()
        assert self._library.baton_norm_call_bytes() == ctypes.sizeof(NormCall)
        self._call = NormCall(weight=self._scale.data_ptr(), width=len(self._scale), eps=norm_eps(norm))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] bfloat16 -> the same shape."""
        call = self._call
        rows = x.reshape(-1, call.width)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        call.x, call.out, call.rows, call.stride = rows.data_ptr(), out.data_ptr(), len(rows), rows.stride(0)
        call.threads = kernel_threads()
        self._library.baton_norm(ctypes.byref(call))
        return out


def fusible(norm: Any) -> bool:
    """Whether CpuNorm computes the same as this module."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.dtype == torch.bfloat16 and len(weight) % GROUP == 0
