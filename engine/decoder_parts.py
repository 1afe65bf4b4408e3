"""The parts of Llama-shaped transformers decoders, for those who compute whole decoders themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.attention_layers import attention_layers
from engine.layer_classes import NORMS_PLUS_ONE

DENSE = (
    *("CwmModel", "Gemma2Model", "Gemma3TextModel", "GraniteModel", "LlamaModel", "MistralModel"),
    *("Phi3Model", "Qwen2Model", "Qwen3Model", "SeedOssModel", "SmolLM3Model"),
)
"""The transformers classes of which these are the parts, with a gated MLP in each layer."""


class Rope(NamedTuple):
    """A rotary embedding."""

    frequencies: torch.Tensor  # float32, of half the values that are rotated
    scale: float  # of cosines and sines


class Place(NamedTuple):
    """Where a layer's keys and values are, and how they are rotated."""

    group: int  # 0: the layers that see all tokens, 1: those with a window
    place: int  # among the layers of its group
    rope: int | None  # of ropes()


@dataclass(frozen=True)
class AttentionParts:
    """The weights of one layer's attention."""

    qkv: tuple[torch.Tensor, ...]  # rows of q, of k and of v
    qkv_bias: tuple[torch.Tensor, ...] | None
    q_norm: Any
    k_norm: Any


class Norms(NamedTuple):
    """The norms of one layer over hidden states."""

    before_attention: Any
    after_attention: Any  # of what attention adds to the residual. None: there is none
    before_mlp: Any
    after_mlp: Any


def attention_parts(attention: Any) -> AttentionParts:
    """Of the attention module of a layer."""
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if hasattr(attention, "qkv_proj"):  # Phi 3
        joined, width = attention.qkv_proj.weight, attention.num_key_value_heads * attention.head_dim
        parts = joined[: -2 * width], joined[-2 * width : -width], joined[-width:]
        return AttentionParts(parts, None, q_norm, k_norm)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biased = attention.q_proj.bias is not None
    return AttentionParts(
        tuple(projection.weight for projection in projections),
        tuple(projection.bias for projection in projections) if biased else None,
        q_norm,
        k_norm,
    )


def gate_and_up(mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a gated MLP."""
    if hasattr(mlp, "gate_up_proj"):
        joined = mlp.gate_up_proj.weight
        return joined[: len(joined) // 2], joined[len(joined) // 2 :]  # of a StoredTensor, too, not chunk()
    return mlp.gate_proj.weight, mlp.up_proj.weight


def layer_norms(layer: Any) -> Norms:
    """Of a decoder layer."""
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return Norms(layer.input_layernorm, None, layer.post_attention_layernorm, None)
    return Norms(  # Gemma
        layer.input_layernorm,
        layer.post_attention_layernorm,
        layer.pre_feedforward_layernorm,
        layer.post_feedforward_layernorm,
    )


def norm_weight(norm: Any) -> torch.Tensor:
    """float32: by what a norm multiplies."""
    weight: torch.Tensor = norm.weight.detach().float()
    return weight + 1.0 if type(norm).__name__ in NORMS_PLUS_ONE else weight


def norm_eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def ropes(model: Any) -> dict[str, Rope]:
    """By the type of the layers that they rotate; "": of all."""
    rotary = model.rotary_emb
    result = {}
    for kind in getattr(rotary, "layer_types", None) or [""]:
        prefix = f"{kind}_" if kind else ""
        frequencies = getattr(rotary, f"{prefix}inv_freq").float()
        result[kind] = Rope(frequencies, float(getattr(rotary, f"{prefix}attention_scaling")))
    return result


def places(model: Any) -> list[Place]:
    """Of the model's layers, in order."""
    kinds = list(ropes(model))
    counts = [0, 0]
    result = []
    for facts, layer in zip(attention_layers(model, {}), model.layers, strict=True):
        group = int(facts.window is not None)
        rope = 0 if kinds == [""] else kinds.index(model.config.layer_types[facts.layer])
        rotates = getattr(layer.self_attn, "use_rope", True)  # not in all layers of SmolLM 3
        result.append(Place(group, counts[group], rope if rotates else None))
        counts[group] += 1
    return result


def embedding(model: Any) -> nn.Embedding:
    """The embedding without a factor, over the same weight."""
    plain = nn.Embedding(1, 1, device="meta")
    plain.weight = model.embed_tokens.weight
    return plain


def embedding_scale(model: Any) -> float:
    """The factor on what the embedding has, as transformers rounds it."""
    own = getattr(model.embed_tokens, "scalar_embed_scale", None)  # Gemma
    if own is not None:
        return float(torch.tensor(own, dtype=model.embed_tokens.weight.dtype))
    return float(getattr(model, "embedding_multiplier", 1.0))  # Granite


def residual_scale(model: Any) -> float:
    """The factor on what attention and MLPs add to the residual."""
    return float(getattr(model.config, "residual_multiplier", 1.0))  # Granite
