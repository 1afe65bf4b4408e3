"""A mixture of experts that reads only the weights of the experts that its tokens selected."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import GELUTanh, SiLUActivation

from engine.cpu.linear import GROUP, Matrix, Packer, Weights, packable
from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.layer_classes import CLAMPED, activation_of, clamps_first, limit_of, sharpness_of

_ACTIVATIONS = (nn.SiLU, SiLUActivation, GELUTanh)


def fusible(experts: Any) -> bool:
    """Whether this module's weights can be packed and its activation function is computed here."""
    gate_up, down = _weights(experts)
    return (
        packable(gate_up[0])
        and packable(down[0])
        and down.shape[1] % GROUP == 0
        and _is_computed(activation_of(experts))
        and clamps_first(experts)
    )


def _is_computed(activation: object) -> bool:
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
        *((name, ctypes.c_int32) for name in ("chosen_count", "experts", "hidden", "inner")),
        *((name, ctypes.c_float) for name in ("sharpness", "cubic", "offset", "limit")),
        ("threads", ctypes.c_int32),
    )


class PackedExperts(nn.Module):
    """All experts in two packs, computed by one C++ call. Sums are float32 up to the final result."""

    def __init__(self, experts: Any, packer: Packer | None = None) -> None:
        super().__init__()
        packer = packer or Packer()
        clamped = type(experts).__name__ == CLAMPED
        sharpness, cubic, offset, limit = _activation(experts)
        gate_up, down = _weights(experts)
        count, width, hidden = gate_up.shape
        halves = [
            Matrix(weight, expert * width // GROUP + half, 2)
            for expert in range(count)
            for half, weight in enumerate(_halves(gate_up[expert], clamped))
        ]
        self._gate_up = packer.pack(count * width, hidden, halves)
        downs = [Matrix(down[i], i * hidden // GROUP) for i in range(count)]
        self._down = packer.pack(count * hidden, width // 2, downs)
        self._library = kernels()
        assert self._library.baton_experts_call_bytes() == ctypes.sizeof(ExpertsCall)
        self._call = ExpertsCall(
            gate_up=self._gate_up.weights(),
            down=self._down.weights(),
            experts=count,
            hidden=hidden,
            inner=width // 2,
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
    """The weights as [experts, 2 x inner, hidden] and [experts, hidden, inner], for both storage orders."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    return (gate_up.transpose(1, 2), down.transpose(1, 2)) if experts.is_transposed else (gate_up, down)


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
