"""What differs between gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid) and Kimi's delta attention, for
those who compute what is between their projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

KIMI = ("KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Glm5NextTextLinearAttention")
"""They have a decay for each channel of a head's keys."""
OLMO = "OlmoHybridGatedDeltaNet"
DELTA_NETS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", OLMO, *KIMI)
"""The transformers classes with a DeltaForm."""


class HeadsPlace(NamedTuple):
    """Where the heads of one input lie in the output of a projection, in elements."""

    projection: int  # its number among the outputs of DeltaForm.project
    first: int  # of key head 0
    head: int  # from one key head to the next


@dataclass(frozen=True)
class DeltaForm:
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
    places: dict[str, HeadsPlace]  # of q, k, v, z (the gate), b (the rate) and a (the decay)
    out: nn.Module
    bound: float = 0.0  # see delta_net.h
    rates: float = 1.0  # the same


def delta_form(mixer: Any) -> DeltaForm:
    if type(mixer).__name__ == OLMO:
        return _olmo(mixer)
    return _kimi(mixer) if type(mixer).__name__ in KIMI else _gated(mixer)


def _olmo(mixer: Any) -> DeltaForm:
    """A projection for each input. Rates up to 2 may turn what a state knows of a key into its opposite."""
    key, ratio = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads
    values = ratio * mixer.head_v_dim  # of one key head
    widths = {"q": key, "k": key, "v": values, "z": values, "b": ratio, "a": ratio}
    names = [f"{name}_proj" for name in "qkvgba"]
    places = {name: HeadsPlace(number, 0, width) for number, (name, width) in enumerate(widths.items())}

    def project(hidden: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(mixer, name)(hidden) for name in names]

    dims = mixer.num_k_heads, ratio, key, mixer.head_v_dim, 1
    rates = 2.0 if mixer.allow_neg_eigval else 1.0
    decay = mixer.A_log, mixer.dt_bias
    return DeltaForm(*dims, mixer.o_norm, *decay, project, places, mixer.o_proj, rates=rates)


def _kimi(mixer: Any) -> DeltaForm:
    """Ling's projects gates and decays at once, Kimi's through a low rank."""
    dim, gate = mixer.head_dim, mixer.forget_gate
    is_ling = hasattr(mixer, "g_proj")
    gates = mixer.g_proj if is_ling else nn.Sequential(mixer.g_a_proj, mixer.g_b_proj)
    decays = gate.f_proj if is_ling else nn.Sequential(gate.f_a_proj, gate.f_b_proj)

    def project(hidden: torch.Tensor) -> list[torch.Tensor]:
        of_heads = [projection(hidden) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]
        return [*of_heads, gates(hidden), mixer.b_proj(hidden), decays(hidden)]

    places = {name: HeadsPlace(number, 0, dim) for number, name in enumerate("qkvz")}
    places |= {"b": HeadsPlace(4, 0, 1), "a": HeadsPlace(5, 0, dim)}
    decay = gate.A_log.flatten(), gate.dt_bias
    bound = gate.lower_bound if getattr(gate, "safe_gate", False) else None
    bound = getattr(gate, "safe_gate_lower_bound", bound)  # GLM's
    dims = mixer.num_heads, 1, dim, dim, dim
    return DeltaForm(*dims, mixer.o_norm, *decay, project, places, mixer.o_proj, bound or 0.0)


def _gated(mixer: Any) -> DeltaForm:
    """Qwen3-Next projects by key head, Qwen3.5 one input after the other."""
    key, ratio = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads
    values = ratio * mixer.head_v_dim  # of one key head
    names: tuple[str, ...]
    if hasattr(mixer, "in_proj_qkvz"):
        names, head = ("in_proj_qkvz", "in_proj_ba"), 2 * key + 2 * values
        places = {
            "q": HeadsPlace(0, 0, head),
            "k": HeadsPlace(0, key, head),
            "v": HeadsPlace(0, 2 * key, head),
            "z": HeadsPlace(0, 2 * key + values, head),
            "b": HeadsPlace(1, 0, 2 * ratio),
            "a": HeadsPlace(1, ratio, 2 * ratio),
        }
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        places = {
            "q": HeadsPlace(0, 0, key),
            "k": HeadsPlace(0, mixer.key_dim, key),
            "v": HeadsPlace(0, 2 * mixer.key_dim, values),
            "z": HeadsPlace(1, 0, values),
            "b": HeadsPlace(2, 0, ratio),
            "a": HeadsPlace(3, 0, ratio),
        }

    def project(hidden: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(mixer, name)(hidden) for name in names]

    dims = mixer.num_k_heads, ratio, key, mixer.head_v_dim, 1
    return DeltaForm(*dims, mixer.norm, mixer.A_log, mixer.dt_bias, project, places, mixer.out_proj)
