"""What each layer of a decoder adds for a token: the per-layer embeddings of Gemma 4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class LayerInputs(nn.Module):
    """A decoder's inputs of all layers. transformers' modules compute them.

    Not the methods of its decoder, which would be kept with all that is packed.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers: int = model.config.num_hidden_layers
        self.width: int = model.hidden_size_per_layer_input
        self.embed_tokens_per_layer = model.embed_tokens_per_layer
        self.per_layer_model_projection = model.per_layer_model_projection
        self.per_layer_projection_norm = model.per_layer_projection_norm
        self._projection_scale: float = model.per_layer_model_projection_scale
        self._scale: float = model.per_layer_input_scale

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """ids [T], embedded [T, hidden], with the embedding's factor -> [T, layers, width]."""
        shape = (*ids.shape, self.layers, self.width)
        of_tokens = self.embed_tokens_per_layer(ids).view(shape)
        projected = self.per_layer_model_projection(embedded) * self._projection_scale
        result: torch.Tensor = self.per_layer_projection_norm(projected.view(shape)) + of_tokens
        return result * self._scale


class LayerInputParts(NamedTuple):
    """How one layer adds its inputs: norm(out(act(gate(hidden states)) * inputs))."""

    gate: torch.Tensor  # [width, hidden]
    out: torch.Tensor  # [hidden, width]
    norm: Any


def layer_inputs(model: Any) -> LayerInputs | None:
    """Of a transformers decoder. None: its layers have no inputs."""
    return LayerInputs(model) if getattr(model, "hidden_size_per_layer_input", 0) else None


def layer_input_parts(layer: Any) -> LayerInputParts | None:
    """Of a decoder layer."""
    if not getattr(layer, "hidden_size_per_layer_input", 0):
        return None
    gate, out = layer.per_layer_input_gate.weight, layer.per_layer_projection.weight
    return LayerInputParts(gate, out, layer.post_per_layer_input_norm)
