"""Gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid) and Kimi's delta attention: one C++ call between
the projections.

With transformers' modules a decode step of one layer takes some forty operators, five of which go through the
whole state [heads, key_dim, value_dim] in float32, and states are gathered and scattered besides. Here a
state is read from one slot and written to another, which may be the same. Chunks go the same way, one token
after the other: a head's state stays in the second-level cache, and the parallel form has more to compute.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.delta_forms import delta_form
from engine.states import CONV, RECURRENT

_CONVERTED = ("A_log", "dt_bias", "conv1d.weight")
"""Parameters that may be in float32."""
MAX_DIM, MAX_TAPS = 256, 8  # kMaxDim in delta_net.h, kMaxTaps in convolution.h


class _Heads(ctypes.Structure):
    """`baton::delta_net::Heads` in delta_net.h."""

    _fields_ = (("data", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64))


class DeltaNetCall(ctypes.Structure):
    """`baton::delta_net::Call` in delta_net.h."""

    _fields_ = (
        *((name, _Heads) for name in ("q", "k", "v", "z", "b", "a")),
        *((name, ctypes.c_void_p) for name in ("conv", "recurrent")),
        *((name, ctypes.c_int64) for name in ("conv_slot", "recurrent_slot")),
        *((name, ctypes.c_void_p) for name in ("reads", "writes")),
        *((name, ctypes.c_void_p) for name in ("conv_weight", "rate", "dt_bias", "norm", "out")),
        ("rows", ctypes.c_int64),
        ("length", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("key_heads", "ratio", "key_dim", "value_dim", "taps")),
        *((name, ctypes.c_int32) for name in ("decays", "is_silu")),
        *((name, ctypes.c_float) for name in ("bound", "rates", "eps")),
        ("threads", ctypes.c_int32),
    )


def fusible(mixer: Any) -> bool:
    """Whether DeltaNet computes the same as this transformers mixer."""
    form = delta_form(mixer)
    return (
        mixer.activation == "silu"
        and form.norm.activation in ("silu", "sigmoid")
        and mixer.conv1d.bias is None
        and mixer.conv_kernel_size <= MAX_TAPS
        and len(form.a_log) == form.key_heads * form.ratio
        and all(dim % 16 == 0 and dim <= MAX_DIM for dim in (form.key_dim, form.value_dim))
        and all(p.device.type == "cpu" for p in mixer.parameters())
        and all(
            p.dtype == torch.bfloat16 for name, p in mixer.named_parameters() if not name.endswith(_CONVERTED)
        )
    )


class DeltaNet(nn.Module):
    """Replaces a `fusible` mixer."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self._form = form = delta_form(mixer)
        self._kept = (
            mixer.conv1d.weight.detach().float().squeeze(1).t().contiguous(),
            -form.a_log.detach().float().exp(),
            form.dt_bias.detach().float().contiguous(),
            form.norm.weight.detach().float().contiguous(),
        )
        conv, rate, dt_bias, norm = (kept.data_ptr() for kept in self._kept)
        self._library = kernels()
        assert self._library.baton_delta_net_call_bytes() == ctypes.sizeof(DeltaNetCall)
        self._call = DeltaNetCall(
            conv_weight=conv,
            rate=rate,
            dt_bias=dt_bias,
            norm=norm,
            key_heads=form.key_heads,
            ratio=form.ratio,
            key_dim=form.key_dim,
            value_dim=form.value_dim,
            taps=mixer.conv_kernel_size,
            decays=form.decays,
            is_silu=form.norm.activation == "silu",
            bound=form.bound,
            rates=form.rates,
            eps=form.norm.variance_epsilon,
        )

    def run(
        self,
        hidden: torch.Tensor,
        states: dict[str, torch.Tensor],
        reads: torch.Tensor | None,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """A RunInSlots (engine/states.py)."""
        call, conv, recurrent = self._call, states[CONV], states[RECURRENT]
        assert (conv.dtype, recurrent.dtype) == (torch.bfloat16, torch.float32)
        projected = self._form.project(hidden)
        for name, (projection, first, head) in self._form.places.items():
            source = projected[projection]
            data = source.data_ptr() + first * source.element_size()
            setattr(call, name, _Heads(data, source.stride(0), head))
        call.conv, call.conv_slot = conv.data_ptr(), conv.stride(0) * conv.element_size()
        call.recurrent, call.recurrent_slot = (
            recurrent.data_ptr(),
            recurrent.stride(0) * recurrent.element_size(),
        )
        call.reads = None if reads is None else reads.data_ptr()
        call.writes, call.rows, call.length = writes.data_ptr(), len(writes), len(hidden) // len(writes)
        width = call.key_heads * call.ratio * call.value_dim
        out = torch.empty(len(hidden), width, dtype=torch.bfloat16)
        call.out, call.threads = out.data_ptr(), kernel_threads()
        self._library.baton_delta_net(ctypes.byref(call))
        result: torch.Tensor = self._form.out(out)
        return result
