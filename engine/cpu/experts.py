"""A mixture of experts that reads only the weights of the experts that its tokens selected."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import GELUTanh, ReLUSquaredActivation, SiLUActivation

from engine.cpu.linear import GROUP, Matrix, Packer, Weights, packable
from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.layer_classes import (
    CLAMPED,
    UNGATED_EXPERTS,
    activation_of,
    clamps_first,
    limit_of,
    sharpness_of,
)

_ACTIVATIONS = (nn.SiLU, SiLUActivation, GELUTanh)


def fusible(experts: Any) -> bool:
    """Whether this module's weights can be packed and its activation function is computed here."""
    up, down = _weights(experts)
    is_packable = packable(up[0]) and packable(down[0]) and down.shape[1] % GROUP == 0
    return is_packable and _is_computed(experts) and clamps_first(experts)


def _has_gates(experts: Any) -> bool:
    return type(experts).__name__ not in UNGATED_EXPERTS


def _is_computed(experts: Any) -> bool:
    activation = activation_of(experts)
    if not _has_gates(experts):
        return isinstance(activation, ReLUSquaredActivation)
    return activation is functional.silu or isinstance(activation, _ACTIVATIONS)


class ExpertsCall(ctypes.Structure):
    """`baton::experts::Call` in experts.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("chosen", "factors", "out", "rows", "activated", "sums")),
        *((name, Weights) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("chosen_count", "experts", "hidden", "inner", "has_gates")),
        *((name, ctypes.c_float) for name in ("sharpness", "cubic", "offset", "limit")),
        ("threads", ctypes.c_int32),
    )


class PackedExperts(nn.Module):
    """All experts in two packs, computed by one C++ call. Sums are float32 up to the final result."""

    def __init__(self, experts: Any, packer: Packer | None = None) -> None:
        super().__init__()
        packer = packer or Packer()
        clamped, has_gates = type(experts).__name__ == CLAMPED, _has_gates(experts)
        sharpness, cubic, offset, limit = _activation(experts)
        up, down = _weights(experts)
        (count, width, hidden), inner = up.shape, down.shape[2]
        parts = [
            Matrix(weight, expert * width // GROUP + part, 2 if has_gates else 1)
            for expert in range(count)
            for part, weight in enumerate(_halves(up[expert], clamped) if has_gates else (up[expert],))
        ]
        self._up = packer.pack(count * width, hidden, parts)
        downs = [Matrix(down[i], i * hidden // GROUP) for i in range(count)]
        self._down = packer.pack(count * hidden, inner, downs)
        self._library = kernels()
        assert self._library.baton_experts_call_bytes() == ctypes.sizeof(ExpertsCall)
        self._call = ExpertsCall(
            gate_up=self._up.weights(),
            down=self._down.weights(),
            experts=count,
            hidden=hidden,
            inner=inner,
            has_gates=has_gates,
            sharpness=sharpness,
            cubic=cubic,
            offset=offset,
            limit=limit,
        )
        if clamped:
            self._biases = (
                _alternating(experts.gate_up_proj_bias),
                experts.down_proj_bias.float().contiguous(),
            )
            self._call.gate_up_bias, self._call.down_bias = (bias.data_ptr() for bias in self._biases)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] bfloat16, [T, k] expert numbers, [T, k] weights -> [T, hidden] in bfloat16."""
        call, (tokens, chosen) = self._call, top_k_index.shape
        x = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
        index, factors = top_k_index.contiguous(), top_k_weights.float().contiguous()
        assert index.dtype == torch.int64
        rows = torch.empty(tokens * chosen, call.hidden + call.inner, dtype=torch.bfloat16)
        sums = torch.empty(tokens, call.hidden)
        out = torch.empty(tokens, call.hidden, dtype=torch.bfloat16)
        call.x, call.x_stride, call.tokens, call.chosen_count = x.data_ptr(), x.stride(0), tokens, chosen
        call.chosen, call.factors, call.out = index.data_ptr(), factors.data_ptr(), out.data_ptr()
        call.rows, call.sums = rows.data_ptr(), sums.data_ptr()
        call.activated = rows.data_ptr() + rows.element_size() * tokens * chosen * call.hidden
        call.threads = kernel_threads()
        self._library.baton_experts(ctypes.byref(call))
        return out


def _weights(experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights as [experts, 2 x inner, hidden], or without gates [experts, inner, hidden], and [experts,
    hidden, inner], for both storage orders."""
    up, down = experts.gate_up_proj if _has_gates(experts) else experts.up_proj, experts.down_proj
    return (up.transpose(1, 2), down.transpose(1, 2)) if experts.is_transposed else (up, down)


def _activation(experts: Any) -> tuple[float, float, float, float]:
    """The numbers of a module's activation function in ExpertsCall: sharpness, cubic, offset, limit."""
    if (sharpness := sharpness_of(experts)) is not None:
        return sharpness, 0.0, 1.0, limit_of(experts)
    if isinstance(activation_of(experts), GELUTanh):
        return 2 * math.sqrt(2 / math.pi), 0.044715, 0.0, math.inf
    return 1.0, 0.0, 0.0, limit_of(experts)


def _halves(gate_up: torch.Tensor, alternate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of gates and of ups. In gpt-oss they alternate; elsewhere all gates come first."""
    return (gate_up[::2], gate_up[1::2]) if alternate else tuple(gate_up.chunk(2))  # type: ignore[return-value]


def _alternating(bias: torch.Tensor) -> torch.Tensor:
    """[experts, 2 x inner], gates and ups alternating -> float32, groups of gates and of ups alternating."""
    count = len(bias)
    return bias.detach().float().view(count, -1, GROUP, 2).transpose(2, 3).contiguous()
