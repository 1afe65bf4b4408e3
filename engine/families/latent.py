"""Families with multi-head latent attention in every layer. One with it in some layers is in hybrid.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.heads import cap_logits, divide_logits, widen_inputs
from engine.latent import (
    GatedSparseLatentAttention,
    HunyuanLatentAttention,
    LatentAttention,
    Rotate,
    ScaledLatentAttention,
    SharingLatentAttention,
    SparseLatentAttention,
)
from engine.mistral_large import MistralLargeAttention
from kvcache.layout import LatentGroupSpec

_V2_ROUTING = ("greedy", "group_limited_greedy")


def latent_group(config: Any, dtypes: Dtypes, layer_ids: tuple[int, ...]) -> LatentGroupSpec:
    """These layers as one group of latents."""
    return LatentGroupSpec(layer_ids, config.kv_lora_rank, config.qk_rope_head_dim, dtypes.kv)


def _groups(config: Any, dtypes: Dtypes) -> tuple[LatentGroupSpec, ...]:
    return (latent_group(config, dtypes, tuple(range(config.num_hidden_layers))),)


def _sparse_groups(config: Any, dtypes: Dtypes) -> tuple[LatentGroupSpec, ...]:
    """A page has one row per layer and token. So GLM's layers without an indexer have room for a key, too."""
    return tuple(replace(group, index_dim=config.index_head_dim) for group in _groups(config, dtypes))


def _check(config: Any) -> None:
    """Raises UnsupportedModel for a config without a latent.

    Layers that predict further tokens (num_nextn_predict_layers) are not checked: transformers does not
    compute them in a forward either.
    """
    if not config.kv_lora_rank:
        raise UnsupportedModel(
            f"kv_lora_rank is {config.kv_lora_rank!r} in config.json: the model has no latent",
            "use a checkpoint with latent attention",
        )
    routed_by(config, "moe_layer_freq", 1)


def _check_v2(config: Any) -> None:
    _check(config)
    routed_by(config, "topk_method", *_V2_ROUTING)
    routed_by(config, "scoring_func", "softmax")
    routed_by(config, "norm_topk_prob", False)


def _check_v3(config: Any) -> None:
    _check(config)
    routed_by(config, "topk_method", "noaux_tc")
    routed_by(config, "scoring_func", "sigmoid")


def _check_sparse(config: Any) -> None:
    _check_v3(config)
    _check_indexers(config)


def _check_indexers(config: Any) -> None:
    kinds = getattr(config, "indexer_types", None) or ["full"]
    if kinds[0] != "full":
        raise UnsupportedModel(
            f"indexer_types begins with {kinds[0]!r} in config.json: there is no choice to go on with",
            "use a checkpoint whose first layer has an indexer",
        )


def _check_scaled(config: Any) -> None:
    _check(config)
    if config.rope_parameters.get("llama_4_scaling_beta") is None:
        raise UnsupportedModel(
            "rope_parameters has no llama_4_scaling_beta in config.json",
            "use a checkpoint that says how its queries grow",
        )


def routed_by(config: Any, key: str, *computed: Any) -> None:
    """Raises UnsupportedModel for a setting of DeepSeek's own code that transformers' does not read."""
    value = getattr(config, key, None)
    if value is not None and value not in computed:
        raise UnsupportedModel(
            f"{key} is {value!r} in config.json: this routing is not computed",
            f"use a model with {' or '.join(map(str, computed))}",
        )


def _rotate_v2(q: torch.Tensor, k: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

    rotated: tuple[torch.Tensor, torch.Tensor] = apply_rotary_emb(q, k, angles)
    return rotated


def rotate_pairs(q: torch.Tensor, k: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    rotated: tuple[torch.Tensor, torch.Tensor] = apply_rotary_pos_emb_interleave(q, k, *angles)
    return rotated


def _rotate_v3_halves(q: torch.Tensor, k: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb

    rotated: tuple[torch.Tensor, torch.Tensor] = apply_rotary_pos_emb(q, k, *angles)
    return rotated


def absorb(model: nn.Module, kind: Callable[..., LatentAttention], *rotations: Rotate) -> None:
    """Replace the attention of every layer that has latents with one of this kind."""
    decoder: Any = model.model
    for layer in decoder.layers:
        if hasattr(layer.self_attn, "kv_b_proj"):
            layer.self_attn = kind(layer.self_attn, *rotations)


def _prepare_v2(model: nn.Module) -> None:
    absorb(model, LatentAttention, _rotate_v2)


def _rotation(model: nn.Module) -> Rotate:
    config: Any = model.config
    return rotate_pairs if config.rope_interleave else _rotate_v3_halves


def _prepare_v3(model: nn.Module) -> None:
    absorb(model, LatentAttention, _rotation(model))


def _prepare_scaled(model: nn.Module) -> None:
    absorb(model, ScaledLatentAttention, _rotation(model))


def _prepare_v32(model: nn.Module) -> None:
    absorb(model, SparseLatentAttention, rotate_pairs, _rotate_v3_halves)


def _prepare_minicpm(model: nn.Module) -> None:
    absorb(model, LatentAttention, _rotate_v3_halves)
    divide_logits(model)


def _prepare_hunyuan(model: nn.Module) -> None:
    absorb(model, HunyuanLatentAttention, _rotate_v3_halves, _rotate_v3_halves)
    widen_inputs(model)


def _prepare_axk2(model: nn.Module) -> None:
    absorb(model, GatedSparseLatentAttention, rotate_pairs, _rotate_v3_halves)


def _prepare_glm(model: nn.Module) -> None:
    absorb(model, SharingLatentAttention, rotate_pairs, rotate_pairs)


def _mistral_large_groups(config: Any, dtypes: Dtypes) -> tuple[LatentGroupSpec, ...]:
    """A layer that reads another's latents has rows if it has an indexer, whose keys are in them."""
    read = _mistral_large_shared(config)
    layers = tuple(layer for layer in range(config.num_hidden_layers) if layer not in read)
    return (replace(latent_group(config, dtypes, layers), index_dim=config.index_head_dim),)


def _mistral_large_shared(config: Any) -> dict[int, int]:
    return {
        layer: source
        for layer, source in enumerate(config.kv_source_layers)
        if source != layer and config.indexer_types[layer] == "shared"
    }


def _check_mistral_large(config: Any) -> None:
    """Raises UnsupportedModel for a layer that would read other latents than transformers gives it: those of
    the last layer of its kind that is read."""
    _check(config)
    _check_indexers(config)
    last: dict[int, int] = {}
    for layer, source in enumerate(config.kv_source_layers):
        kind = config.no_rope_layers[layer]
        if layer in config.kv_source_layers[layer + 1 :]:
            last[kind] = layer
        if source != layer and last.get(kind) != source:
            raise UnsupportedModel(
                f"layer {layer} reads the latents of layer {source} by config.json, not the last one of its "
                "kind that is read",
                "use another checkpoint",
            )


def _prepare_mistral_large(model: nn.Module) -> None:
    decoder: Any = model.model
    for layer in decoder.layers:
        layer.self_attn = MistralLargeAttention(layer.self_attn, rotate_pairs)
    cap_logits(model)


_LATENT = frozenset({"kv_lora_rank"})
_SPARSE = _LATENT | {"index_topk"}
_INDEXED = frozenset({"indexed_attention"})

FAMILIES: dict[str, Family] = {
    "axk1": Family("AXK1ForCausalLM", _groups, allows=_LATENT, check=_check_v3, prepare=_prepare_v3),
    "axk2": Family("AXK2ForCausalLM", _sparse_groups, _INDEXED, _SPARSE, _check_sparse, _prepare_axk2),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", _groups, allows=_LATENT, check=_check_v2, prepare=_prepare_v2
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", _groups, allows=_LATENT, check=_check_v3, prepare=_prepare_v3
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", _sparse_groups, _INDEXED, _SPARSE, _check_sparse, _prepare_v32
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", _groups, allows=_LATENT, check=_check_v3, prepare=_prepare_v3
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", _sparse_groups, _INDEXED, _SPARSE, _check_sparse, _prepare_glm
    ),
    "hy_v4": Family("HYV4ForCausalLM", _sparse_groups, _INDEXED, _SPARSE, _check_sparse, _prepare_hunyuan),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM", _groups, allows=_LATENT, check=_check, prepare=_prepare_minicpm
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM", _groups, allows=_LATENT, check=_check_scaled, prepare=_prepare_scaled
    ),
    "mistral_large4_text": Family(
        "MistralLarge4ForCausalLM",
        _mistral_large_groups,
        _INDEXED,
        _SPARSE | {"final_logit_softcapping"},
        _check_mistral_large,
        _prepare_mistral_large,
        shared=_mistral_large_shared,
    ),
    "youtu": Family("YoutuForCausalLM", _groups, allows=_LATENT, check=_check, prepare=_prepare_v3),
}
