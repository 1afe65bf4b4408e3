"""What differs between Mamba-2 layers (Granite 4.0, Falcon-H1, Nemotron-H, Bamba), for those who compute what
is between their projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MAMBA2 = ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer")
"""Their transformers classes."""


@dataclass(frozen=True)
class GatedNorm:
    """What is done with the result and the gates."""

    weight: torch.Tensor | None  # None: the result is gated and not normalised
    group: int  # channels that are normalised together
    gates_first: bool
    eps: float


def gated_norm(mixer: Any) -> GatedNorm:
    norm, width = mixer.norm, mixer.intermediate_size
    if isinstance(norm, nn.Identity):  # of Falcon-H1, without mamba_rms_norm
        return GatedNorm(None, width, True, 0.0)
    group = getattr(norm, "group_size", None) or width // norm.n_groups
    gates_first = not getattr(norm, "norm_before_gate", False)
    return GatedNorm(norm.weight, group, gates_first, norm.variance_epsilon)


def projected(mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[B, hidden] -> what the projection gives for each token: gates, what is convolved, and time steps.
    Falcon-H1 scales what goes in, and each of these."""
    before, after = getattr(mixer, "ssm_in_multiplier", 1.0), getattr(mixer, "mup_vector", None)
    out: torch.Tensor = mixer.in_proj(hidden if before == 1.0 else hidden * before)
    return out if after is None else out * after.view(-1)
