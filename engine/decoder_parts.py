"""The parts of Llama-shaped transformers decoders, for those who compute decoders themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.attention_layers import attention_layers
from engine.gemma4 import Gemma4Mixture
from engine.kv_sharing import shared_layers
from engine.layer_classes import NORMS_PLUS_ONE

DECODERS = (
    *("ApertusModel", "ArceeModel", "CwmModel", "Dots1Model", "Ernie4_5Model", "Ernie4_5_MoeModel"),
    *("ExaoneMoeModel", "Gemma2Model", "Gemma3TextModel", "Glm4Model", "Glm4MoeModel", "GlmModel"),
    *("GptOssModel", "GraniteModel", "GraniteMoeModel", "HYV3Model", "HyperCLOVAXModel"),
    *("Kolibri1Model", "LlamaModel", "MellumModel", "MinistralModel", "MistralModel"),
    *("MixtralModel", "Phi3Model", "Qwen2Model", "Qwen2MoeModel", "Qwen3Model", "Qwen3MoeModel"),
    *("SeedOssModel", "SmolLM3Model", "SolarOpenModel"),
)
"""The transformers classes of which these are the parts. An MLP may be any module."""
SHARING_DECODERS = ("Gemma4TextModel", "Gemma4UnifiedTextModel")
"""Those with layers that may read an earlier layer's keys and values, and heads that may differ by the type
of a layer. A CPU computes them."""
INTERLEAVED = ("Ernie4_5Model", "Ernie4_5_MoeModel", "Glm4Model", "GlmModel")
"""Those that rotate pairs of neighbouring values of a head, not of its halves."""
ROTATED_IN_PART = ("Glm4Model", "Glm4MoeModel", "GlmModel", "Phi3Model")
"""Those of which the first values of a head may be rotated alone."""


class Rope(NamedTuple):
    """A rotary embedding."""

    frequencies: torch.Tensor  # float32, of half the values that are rotated
    scale: float  # of cosines and sines


class Place(NamedTuple):
    """Where a layer's keys and values are, and how they are rotated."""

    group: int  # 0: the layers that see all tokens, 1: those with a window
    place: int  # among the layers of its group that have keys and values
    rope: int | None  # of ropes()
    shares: bool = False  # whether it reads those of an earlier layer, which has this place


@dataclass(frozen=True)
class AttentionParts:
    """The weights of one layer's attention."""

    qkv: tuple[torch.Tensor, ...]  # rows of q, of k and of v; of q alone, if it shares keys and values
    qkv_bias: tuple[torch.Tensor, ...] | None
    q_norm: Any
    k_norm: Any
    sinks: torch.Tensor | None  # [query heads]: logits that join each softmax
    v_norm: torch.Tensor | None  # [head_dim]: by what the norm of a value multiplies


class Norms(NamedTuple):
    """The norms of one layer over hidden states."""

    before_attention: Any
    after_attention: Any  # of what attention adds to the residual. None: there is none
    before_mlp: Any  # None: the MLP reads the residual
    after_mlp: Any


def attention_parts(attention: Any) -> AttentionParts:
    """Of the attention module of a layer."""
    others = {name: getattr(attention, name, None) for name in ("q_norm", "k_norm", "sinks")}
    others["v_norm"] = torch.ones(attention.head_dim) if hasattr(attention, "v_norm") else None
    if getattr(attention, "is_kv_shared_layer", False):
        return AttentionParts((attention.q_proj.weight,), None, **others)
    if hasattr(attention, "qkv_proj"):  # Phi 3
        joined, width = attention.qkv_proj.weight, attention.num_key_value_heads * attention.head_dim
        parts = joined[: -2 * width], joined[-2 * width : -width], joined[-width:]
        return AttentionParts(parts, None, **others)
    values = attention.v_proj or attention.k_proj  # large sizes of Gemma 4 have values that are keys
    projections = (attention.q_proj, attention.k_proj, values)
    biased = attention.q_proj.bias is not None
    return AttentionParts(
        tuple(projection.weight for projection in projections),
        tuple(projection.bias for projection in projections) if biased else None,
        **others,
    )


def is_gated(mlp: Any) -> bool:
    """Whether an MLP is down(act(gate(x)) * up(x)), without biases."""
    names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    parts = [getattr(mlp, name, None) for name in (*names, "down_proj")]
    return all(part is not None and part.bias is None for part in parts)


def gate_and_up(mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a gated MLP."""
    if hasattr(mlp, "gate_up_proj"):
        joined = mlp.gate_up_proj.weight
        return joined[: len(joined) // 2], joined[len(joined) // 2 :]  # of a StoredTensor, too, not chunk()
    return mlp.gate_proj.weight, mlp.up_proj.weight


def layer_mlp(layer: Any) -> Any:
    """The MLP, or mixture of experts, of a decoder layer."""
    if _is_added_mixture(layer):
        return Gemma4Mixture(layer)
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def _is_added_mixture(layer: Any) -> bool:
    """Whether a layer has a mixture of experts beside its MLP."""
    return bool(getattr(layer, "enable_moe_block", False))


def is_mixture(mlp: Any) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    return hasattr(mlp, "experts")


def mlp_outputs(mlp: Any, rows: torch.Tensor) -> torch.Tensor:
    """rows [T, hidden] -> the same shape."""
    outputs = mlp(rows[None])
    if isinstance(outputs, tuple):  # that of gpt-oss returns its router's scores, too
        outputs = outputs[0]
    result: torch.Tensor = outputs.view(rows.shape)
    return result


_NORMS = {
    "pre_feedforward_layernorm": Norms(  # Gemma
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "post_self_attn_layernorm": Norms(  # Kolibri
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),
    "post_norm1": Norms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    "feedforward_layernorm": Norms("attention_layernorm", None, "feedforward_layernorm", None),  # Apertus
    "input_layernorm": Norms("input_layernorm", None, "post_attention_layernorm", None),
}
"""A name that a layer has -> the names of its norms. The first one counts."""


def layer_norms(layer: Any) -> Norms:
    """Of a decoder layer."""
    names = next(names for sign, names in _NORMS.items() if hasattr(layer, sign))
    found = [None if name is None else getattr(layer, name) for name in names]
    norms = Norms(*(None if isinstance(norm, nn.Identity) else norm for norm in found))  # HyperCLOVA X
    return norms._replace(before_mlp=None) if _is_added_mixture(layer) else norms


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
    result: list[Place] = []
    shared = shared_layers(model.config)
    for facts, layer in zip(attention_layers(model, shared), model.layers, strict=True):
        group = int(facts.window is not None)
        rope = 0 if kinds == [""] else kinds.index(model.config.layer_types[facts.layer])
        shares = facts.shares is not None
        place = result[facts.kv_layer].place if shares else counts[group]
        result.append(Place(group, place, rope if _rotates(layer.self_attn) else None, shares))
        counts[group] += not shares
    return result


def _rotates(attention: Any) -> bool:
    """Whether a layer's q and k are rotated."""
    if hasattr(attention, "use_rope"):  # SmolLM 3
        return bool(attention.use_rope)
    if hasattr(attention, "is_sliding"):  # EXAONE and Kolibri: those with a window, if there are some
        return attention.sliding_window is None or attention.is_sliding
    return True


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


def layer_scale(layer: Any) -> float:
    """The factor on the residual after a layer."""
    return float(getattr(layer, "layer_scalar", 1.0))  # Gemma 4


def residual_scale(model: Any) -> float:
    """The factor on what attention and MLPs add to the residual."""
    return float(getattr(model.config, "residual_multiplier", 1.0))  # Granite
