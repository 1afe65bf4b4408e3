"""Gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid) and Kimi's delta attention: one C++ call between
the projections.

With transformers' modules a decode step of one layer takes some forty operators, five of which go through the
whole state [heads, key_dim, value_dim] in float32, and states are gathered and scattered besides. Here a
state is read from one slot and written to another, which may be the same. Chunks go the same way, one token
after the other: a head's state stays in the second-level cache, and the parallel form has more to compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.states import CONV, RECURRENT

KIMI = ("KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Glm5NextTextLinearAttention")
"""They have a decay for each channel of a head's keys."""
OLMO = "OlmoHybridGatedDeltaNet"
MODELS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", OLMO, *KIMI)
"""The transformers classes that DeltaNet computes."""

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


class _Place(NamedTuple):
    """Where the heads of one input lie in the output of a projection, in elements."""

    projection: int  # its number among the outputs of _Form.project
    first: int  # of key head 0
    head: int  # from one key head to the next


@dataclass(frozen=True)
class _Form:
    """What differs between the mixers."""

    key_heads: int
    ratio: int  # values of a key head
    key_dim: int
    value_dim: int
    decays: int  # of a value's head: 1, or key_dim
    norm: Any  # of a head's result
    a_log: torch.Tensor  # [value heads]
    dt_bias: torch.Tensor  # [value heads x decays]
    project: Callable[[torch.Tensor], list[torch.Tensor]]  # [B, hidden] -> the outputs of projections
    places: dict[str, _Place]  # of q, k, v, z (the gate), b (the rate) and a (the decay)
    out: nn.Module
    bound: float = 0.0  # see delta_net.h
    rates: float = 1.0  # the same


def _form(mixer: Any) -> _Form:
    if type(mixer).__name__ == OLMO:
        return _olmo(mixer)
    return _kimi(mixer) if type(mixer).__name__ in KIMI else _gated(mixer)


def _olmo(mixer: Any) -> _Form:
    """A projection for each input. Rates up to 2 may turn what a state knows of a key into its opposite."""
    key, ratio = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads
    values = ratio * mixer.head_v_dim  # of one key head
    widths = {"q": key, "k": key, "v": values, "z": values, "b": ratio, "a": ratio}
    names = [f"{name}_proj" for name in "qkvgba"]
    places = {name: _Place(number, 0, width) for number, (name, width) in enumerate(widths.items())}

    def project(hidden: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(mixer, name)(hidden) for name in names]

    dims = mixer.num_k_heads, ratio, key, mixer.head_v_dim, 1
    rates = 2.0 if mixer.allow_neg_eigval else 1.0
    decay = mixer.A_log, mixer.dt_bias
    return _Form(*dims, mixer.o_norm, *decay, project, places, mixer.o_proj, rates=rates)


def _kimi(mixer: Any) -> _Form:
    """Ling's projects gates and decays at once, Kimi's through a low rank."""
    dim, gate = mixer.head_dim, mixer.forget_gate
    is_ling = hasattr(mixer, "g_proj")
    gates = mixer.g_proj if is_ling else nn.Sequential(mixer.g_a_proj, mixer.g_b_proj)
    decays = gate.f_proj if is_ling else nn.Sequential(gate.f_a_proj, gate.f_b_proj)

    def project(hidden: torch.Tensor) -> list[torch.Tensor]:
        of_heads = [projection(hidden) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]
        return [*of_heads, gates(hidden), mixer.b_proj(hidden), decays(hidden)]

    places = {name: _Place(number, 0, dim) for number, name in enumerate("qkvz")}
    places |= {"b": _Place(4, 0, 1), "a": _Place(5, 0, dim)}
    decay = gate.A_log.flatten(), gate.dt_bias
    bound = gate.lower_bound if getattr(gate, "safe_gate", False) else None
    bound = getattr(gate, "safe_gate_lower_bound", bound)  # GLM's
    dims = mixer.num_heads, 1, dim, dim, dim
    return _Form(*dims, mixer.o_norm, *decay, project, places, mixer.o_proj, bound or 0.0)


def _gated(mixer: Any) -> _Form:
    """Qwen3-Next projects by key head, Qwen3.5 one input after the other."""
    key, ratio = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads
    values = ratio * mixer.head_v_dim  # of one key head
    names: tuple[str, ...]
    if hasattr(mixer, "in_proj_qkvz"):
        names, head = ("in_proj_qkvz", "in_proj_ba"), 2 * key + 2 * values
        places = {
            "q": _Place(0, 0, head),
            "k": _Place(0, key, head),
            "v": _Place(0, 2 * key, head),
            "z": _Place(0, 2 * key + values, head),
            "b": _Place(1, 0, 2 * ratio),
            "a": _Place(1, ratio, 2 * ratio),
        }
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        places = {
            "q": _Place(0, 0, key),
            "k": _Place(0, mixer.key_dim, key),
            "v": _Place(0, 2 * mixer.key_dim, values),
            "z": _Place(1, 0, values),
            "b": _Place(2, 0, ratio),
            "a": _Place(3, 0, ratio),
        }

    def project(hidden: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(mixer, name)(hidden) for name in names]

    dims = mixer.num_k_heads, ratio, key, mixer.head_v_dim, 1
    return _Form(*dims, mixer.norm, mixer.A_log, mixer.dt_bias, project, places, mixer.out_proj)


def fusible(mixer: Any) -> bool:
    """Whether DeltaNet computes the same as this transformers mixer."""
    form = _form(mixer)
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
        self._form = form = _form(mixer)
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
