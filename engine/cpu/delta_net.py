"""Decode steps of gated delta nets (Qwen3-Next, Qwen3.5): one C++ call between the projections.

With transformers' modules a step of one layer takes some forty operators, five of which go through the
whole state [heads, key_dim, value_dim] in float32, and states are gathered and scattered besides. Here a
state is read from one slot and written to another, which may be the same.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.cpu.op import kernels
from engine.cpu.threads import kernel_threads
from engine.states import CONV, RECURRENT, SequenceStates

MODELS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""The transformers classes that DeltaNet computes."""

MAX_DIM = 256  # delta_net.h: kMaxDim


class _Heads(ctypes.Structure):
    """`baton::delta_net::Heads` in delta_net.h."""

    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))


class DeltaNetCall(ctypes.Structure):
    """`baton::delta_net::Call` in delta_net.h."""

    _fields_ = (
        *((name, _Heads) for name in ("q", "k", "v", "z", "b", "a")),
        *((name, ctypes.c_void_p) for name in ("conv", "recurrent")),
        *((name, ctypes.c_int64) for name in ("conv_slot", "recurrent_slot")),
        *((name, ctypes.c_void_p) for name in ("reads", "writes")),
        *((name, ctypes.c_void_p) for name in ("conv_weight", "rate", "dt_bias", "norm", "out")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("key_heads", "ratio", "key_dim", "value_dim", "taps")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class _Place(NamedTuple):
    """Where the heads of one input lie in the output of a projection, in elements."""

    projection: int  # its number among the outputs of DeltaNet._project
    first: int  # of key head 0
    head: int  # from one key head to the next


def fusible(mixer: Any) -> bool:
    """Whether DeltaNet computes the same as this transformers mixer."""
    return (
        mixer.activation == "silu"
        and mixer.norm.activation == "silu"
        and mixer.conv1d.bias is None
        and mixer.num_v_heads % mixer.num_k_heads == 0
        and all(dim % 16 == 0 and dim <= MAX_DIM for dim in (mixer.head_k_dim, mixer.head_v_dim))
        and all(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in mixer.parameters())
    )


class DeltaNet(nn.Module):
    """Replaces a `fusible` mixer. Chunks of several tokens go through the mixer itself."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self._places = _places(mixer)
        self._kept = (
            mixer.conv1d.weight.detach().float().squeeze(1).contiguous(),
            -mixer.A_log.detach().float().exp(),
            mixer.dt_bias.detach().float().contiguous(),
            mixer.norm.weight.detach().float().contiguous(),
        )
        conv, rate, dt_bias, norm = (kept.data_ptr() for kept in self._kept)
        self._library = kernels()
        assert self._library.baton_delta_net_call_bytes() == ctypes.sizeof(DeltaNetCall)
        self._call = DeltaNetCall(
            conv_weight=conv,
            rate=rate,
            dt_bias=dt_bias,
            norm=norm,
            key_heads=mixer.num_k_heads,
            ratio=mixer.num_v_heads // mixer.num_k_heads,
            key_dim=mixer.head_k_dim,
            value_dim=mixer.head_v_dim,
            taps=mixer.conv_kernel_size,
            eps=mixer.norm.variance_epsilon,
        )

    def forward(self, hidden_states: torch.Tensor, cache_params: SequenceStates) -> torch.Tensor:
        """[B, L, hidden] -> the same shape."""
        out: torch.Tensor = self.mixer(hidden_states=hidden_states, cache_params=cache_params)
        return out

    def step(
        self,
        hidden: torch.Tensor,
        states: dict[str, torch.Tensor],
        reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """One token for each row: hidden [B, hidden] -> the same shape.

        states: this layer's tensors by name, [slots, ...]. Row i's state is read from slot reads[i] and is
        written to slot writes[i].
        """
        call, conv, recurrent = self._call, states[CONV], states[RECURRENT]
        assert (conv.dtype, recurrent.dtype) == (torch.bfloat16, torch.float32)
        projected = self._project(hidden)
        for name, (projection, first, head) in self._places.items():
            source = projected[projection]
            data = source.data_ptr() + first * source.element_size()
            setattr(call, name, _Heads(data, source.stride(0), head))
        call.conv, call.conv_slot = conv.data_ptr(), conv.stride(0) * conv.element_size()
        call.recurrent, call.recurrent_slot = (
            recurrent.data_ptr(),
            recurrent.stride(0) * recurrent.element_size(),
        )
        call.reads, call.writes, call.rows = reads.data_ptr(), writes.data_ptr(), len(hidden)
        out = torch.empty(len(hidden), self.mixer.value_dim, dtype=torch.bfloat16)
        call.out, call.threads = out.data_ptr(), kernel_threads()
        self._library.baton_delta_net(ctypes.byref(call))
        result: torch.Tensor = self.mixer.out_proj(out)
        return result

    def _project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        mixer = self.mixer
        if hasattr(mixer, "in_proj_qkvz"):
            return [mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)]
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return [getattr(mixer, name)(hidden) for name in names]


def _places(mixer: Any) -> dict[str, _Place]:
    """Where the six inputs of the recurrence lie. Qwen3-Next projects them by key head, Qwen3.5 one after the
    other."""
    key, ratio = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads
    values = ratio * mixer.head_v_dim  # of one key head
    if hasattr(mixer, "in_proj_qkvz"):
        head = 2 * key + 2 * values
        return {
            "q": _Place(0, 0, head),
            "k": _Place(0, key, head),
            "v": _Place(0, 2 * key, head),
            "z": _Place(0, 2 * key + values, head),
            "b": _Place(1, 0, 2 * ratio),
            "a": _Place(1, ratio, 2 * ratio),
        }
    return {
        "q": _Place(0, 0, key),
        "k": _Place(0, mixer.key_dim, key),
        "v": _Place(0, 2 * mixer.key_dim, values),
        "z": _Place(1, 0, values),
        "b": _Place(2, 0, ratio),
        "a": _Place(3, 0, ratio),
    }
