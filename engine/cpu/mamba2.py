"""Mamba-2 layers (Granite 4.0, Falcon-H1, Nemotron-H, Bamba): one C++ call between the projections.

With transformers' modules a decode step of one layer takes some thirty operators on gathered states, and a
prompt goes through a parallel form whose products take more work than the recurrence. Here a state is read
from one slot and written to another, which may be the same, and chunks go one token after the other, as in
delta_net.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.mamba2_forms import gated_norm, projected
from engine.states import CONV, RECURRENT

_CONVERTED = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")
"""Parameters that may be in float32."""
MAX_TAPS = 8  # convolution.h: kMaxTaps
TOKENS_AT_ONCE = 64  # mamba2.h: kTokensAtOnce


class Mamba2Call(ctypes.Structure):
    """`baton::mamba2::Call` in mamba2.h."""

    _fields_ = (
        ("projected", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("conv", "recurrent")),
        *((name, ctypes.c_int64) for name in ("conv_slot", "recurrent_slot")),
        *((name, ctypes.c_void_p) for name in ("reads", "writes", "conv_weight", "conv_bias")),
        *((name, ctypes.c_void_p) for name in ("rate", "dt_bias", "skip", "norm", "scratch", "out")),
        ("rows", ctypes.c_int64),
        ("length", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "head_dim", "groups", "state_dim", "taps")),
        *((name, ctypes.c_int32) for name in ("norm_group", "gates_first")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def fusible(mixer: Any) -> bool:
    """Whether Mamba2 computes the same as this transformers mixer."""
    dims = mixer.intermediate_size, mixer.ssm_state_size, gated_norm(mixer).group
    return (
        mixer.activation == "silu"
        and mixer.conv_kernel_size <= MAX_TAPS
        and all(dim % 16 == 0 for dim in dims)
        and all(p.device.type == "cpu" for p in mixer.parameters())
        and all(
            p.dtype == torch.bfloat16 for name, p in mixer.named_parameters() if not name.endswith(_CONVERTED)
        )
    )


def _kept(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().float().contiguous()


class Mamba2(nn.Module):
    """Replaces a `fusible` mixer."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer
        norm, bias = gated_norm(mixer), mixer.conv1d.bias
        kept = {
            "conv_weight": _kept(mixer.conv1d.weight.squeeze(1).t()),
            "rate": -_kept(mixer.A_log).exp(),
            "dt_bias": _kept(mixer.dt_bias),
            "skip": _kept(mixer.D),
        }
        if bias is not None:
            kept["conv_bias"] = _kept(bias)
        if norm.weight is not None:
            kept["norm"] = _kept(norm.weight)
        self._kept = kept
        self._library = kernels()
        assert self._library.baton_mamba2_call_bytes() == ctypes.sizeof(Mamba2Call)
        self._call = Mamba2Call(
            **{name: tensor.data_ptr() for name, tensor in kept.items()},
            heads=mixer.num_heads,
            head_dim=mixer.head_dim,
            groups=mixer.n_groups,
            state_dim=mixer.ssm_state_size,
            taps=mixer.conv_kernel_size,
            norm_group=norm.group,
            gates_first=norm.gates_first,
            eps=norm.eps,
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
        inputs = projected(self.mixer, hidden)
        call.projected, call.token = inputs.data_ptr(), inputs.stride(0)
        call.conv, call.conv_slot = conv.data_ptr(), conv.stride(0) * conv.element_size()
        call.recurrent = recurrent.data_ptr()
        call.recurrent_slot = recurrent.stride(0) * recurrent.element_size()
        call.reads = None if reads is None else reads.data_ptr()
        call.writes, call.rows, call.length = writes.data_ptr(), len(writes), len(hidden) // len(writes)
        width, channels = self.mixer.intermediate_size, self.mixer.conv_dim
        scratch = torch.empty(min(len(hidden), TOKENS_AT_ONCE), channels + width)
        out = torch.empty(len(hidden), width, dtype=torch.bfloat16)
        call.scratch, call.out, call.threads = scratch.data_ptr(), out.data_ptr(), kernel_threads()
        self._library.baton_mamba2(ctypes.byref(call))
        result: torch.Tensor = self.mixer.out_proj(out)
        return result
