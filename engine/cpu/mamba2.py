"""Mamba-2 layers (Granite 4.0, Falcon-H1, Nemotron-H, Bamba): one C++ call between the projections.

With transformers' modules a decode step of one layer takes some thirty operators on gathered states, and a
prompt goes through a parallel form whose products take more work than the recurrence. Here a state is read
from one slot and written to another, which may be the same, and chunks go one token after the other, as in
delta_net.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.states import CONV, RECURRENT

MODELS = ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer")
"""The transformers classes that Mamba2 computes."""

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


@dataclass(frozen=True)
class _GatedNorm:
    """What is done with the result and the gates."""

    weight: torch.Tensor | None  # None: the result is gated and not normalised
    group: int  # channels that are normalised together
    gates_first: bool
    eps: float


def _norm(mixer: Any) -> _GatedNorm:
    norm, width = mixer.norm, mixer.intermediate_size
    if isinstance(norm, nn.Identity):  # of Falcon-H1, without mamba_rms_norm
        return _GatedNorm(None, width, True, 0.0)
    group = getattr(norm, "group_size", None) or width // norm.n_groups
    gates_first = not getattr(norm, "norm_before_gate", False)
    return _GatedNorm(norm.weight, group, gates_first, norm.variance_epsilon)


def fusible(mixer: Any) -> bool:
    """Whether Mamba2 computes the same as this transformers mixer."""
    dims = mixer.intermediate_size, mixer.ssm_state_size, _norm(mixer).group
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
        norm, bias = _norm(mixer), mixer.conv1d.bias
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
        self._scales = getattr(mixer, "ssm_in_multiplier", 1.0), getattr(mixer, "mup_vector", None)
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
        projected = self._projected(hidden)
        call.projected, call.token = projected.data_ptr(), projected.stride(0)
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

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gates, what is convolved, and time steps. Falcon-H1 scales what goes in, and each of these."""
        before, after = self._scales
        projected: torch.Tensor = self.mixer.in_proj(hidden if before == 1.0 else hidden * before)
        return projected if after is None else projected * after.view(-1)
