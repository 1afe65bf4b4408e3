"""Gemma 3n's decoder: several streams of hidden states, and gates of which few are kept."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from engine.kv_sharing import KVSharingDecoder


class Gemma3nDecoder(KVSharingDecoder):
    """Of Gemma3nTextModel. A token has several streams (AltUp, arXiv 2301.13310), [streams, 1, T, hidden]:
    its embedding, and projections of it that are scaled to the same magnitude. The layers update them all,
    and what comes out is the mean of the first and of projections of the others, again of its magnitude."""

    def _first(self, embedded: torch.Tensor) -> torch.Tensor:
        projected = [project(embedded) for project in self.decoder.altup_projections]
        return torch.stack([embedded, *(_scaled(one, embedded) for one in projected)])

    def _of_layers(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        model = self.decoder
        result: torch.Tensor = model.project_per_layer_inputs(embedded, model.get_per_layer_inputs(input_ids))
        return result

    def _unread(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[0]

    def _last(self, hidden: torch.Tensor) -> torch.Tensor:
        first, *others = hidden
        pairs = zip(self.decoder.altup_unembed_projections, others, strict=True)
        return torch.stack([first, *(_scaled(project(one), first) for project, one in pairs)]).mean(0)


_LEAST = 1e-5
"""Of a mean square, in Gemma 3n."""


def _scaled(stream: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A stream with the root mean square of another. The order of operations is transformers'."""
    target = like.square().mean(-1, keepdim=True) ** 0.5
    own = stream.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
    return stream * target / own


class SparseMLP(nn.Module):
    """Replaces a Gemma3nTextMLP with an activation_sparsity: of a token's gates it keeps those that exceed
    their mean by so many standard deviations that, were they normal, this share of them would not.

    transformers makes that number anew in each step, on the host, which a recorded step cannot do.
    """

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._act = mlp.act_fn
        share = torch.tensor(mlp.activation_sparsity, dtype=torch.float32, device="cpu")
        deviations = torch.erfinv(2 * share - 1) * math.sqrt(2)  # as torch.distributions.Normal.icdf
        self._deviations = float(deviations.to(mlp.gate_proj.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same shape."""
        gates = self.gate_proj(x)
        spread = gates.std(-1, keepdim=True, unbiased=False)
        kept = torch.relu(gates - (gates.mean(-1, keepdim=True) + spread * self._deviations))
        out: torch.Tensor = self.down_proj(self._act(kept) * self.up_proj(x))
        return out


def thin_gates(model: Any) -> None:
    """Replace the MLPs that keep few gates."""
    for layer in model.layers:
        if layer.mlp.activation_sparsity > 0.0:
            layer.mlp = SparseMLP(layer.mlp)
