"""Families in which some layers keep a state of fixed size and some attend: to all tokens, to a window, or to
latents (Kimi Linear).

Jamba is not in the table. In transformers its state depends on how the tokens are cut into chunks, so a
cached state cannot be exact: its scan of several tokens ignores the state passed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.heads import divide_logits, scale_logits
from engine.families.latent import absorb, latent_group, rotate_pairs, routed_by
from engine.families.windowed import check_named, full_and_window, layers_of
from engine.kpool_latent import ROTATED, KPoolLatentAttention
from engine.latent import HeadGatedLatentAttention, LatentAttention, unrotated
from engine.states import CONV, RECURRENT, PackedMixer
from kvcache.layout import GroupSpec, LatentGroupSpec, StateGroupSpec, StateTensor

_ATTEND = frozenset({"full_attention", "indexed_attention", "hybrid"})
"""Values of layer_types; a hybrid layer does both."""
_SLIDE = "sliding_attention"
_KEEP_STATE = frozenset({"linear_attention", "conv", "hybrid"})
_MIXERS = {
    "Qwen3NextGatedDeltaNet": "cache_params",
    "Qwen3_5GatedDeltaNet": "cache_params",
    "Qwen3_5MoeGatedDeltaNet": "cache_params",
    "BambaMixer": "cache_params",
    "FalconH1Mixer": "cache_params",
    "GraniteMoeHybridMambaLayer": "cache_params",
    "NemotronHMamba2Mixer": "cache_params",
    "KimiLinearDeltaAttention": "cache_params",
    "BailingHybridDeltaAttention": "cache_params",
    "Glm5NextTextLinearAttention": "cache_params",
    "OlmoHybridGatedDeltaNet": "cache_params",
    "Lfm2ShortConv": "past_key_values",
    "Lfm2MoeShortConv": "past_key_values",
    "Lfm3ShortConv": "past_key_values",
}
"""transformers class -> the keyword argument in which it takes its cache."""

_RECURRENT_DTYPE = torch.float32  # transformers keeps recurrent states in float32 in every model

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the tensors of one layer's state, by name."""


def _groups(shapes_of: Callable[[Any], Shapes]) -> Callable[[Any, Dtypes], tuple[GroupSpec, ...]]:
    def groups(config: Any, dtypes: Dtypes) -> tuple[GroupSpec, ...]:
        full, windowed = (layers_of(config, wanted) for wanted in (_ATTEND, {_SLIDE}))
        window = getattr(config, "sliding_window", None)
        attention = full_and_window(config, dtypes, full, windowed, window)
        return *attention, *_state_group(config, dtypes, shapes_of(config))

    return groups


def _kimi_groups(config: Any, dtypes: Dtypes) -> tuple[GroupSpec, ...]:
    """Latents, and states like those of delta nets, with as many heads of keys as of values."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    shapes = {CONV: (3 * heads * dim, config.linear_conv_kernel_dim), RECURRENT: (heads, dim, dim)}
    latents = latent_group(config, dtypes, layers_of(config, _ATTEND))
    return latents, *_state_group(config, dtypes, shapes)


def _glm_groups(config: Any, dtypes: Dtypes) -> tuple[GroupSpec, ...]:
    """As Kimi's. A token's row has its index key and what weighs it in the key of a k-pool."""
    latents, *states = _kimi_groups(config, dtypes)
    assert isinstance(latents, LatentGroupSpec)
    return replace(latents, rope_dim=ROTATED, index_dim=2 * config.index_head_dim), *states


def _state_group(config: Any, dtypes: Dtypes, shapes: Shapes) -> tuple[StateGroupSpec, ...]:
    """Empty if layer_types names no layer that keeps a state."""
    tensor_dtypes = {CONV: dtypes.model, RECURRENT: _RECURRENT_DTYPE}
    tensors = tuple(
        StateTensor(layer, name, shape, tensor_dtypes[name])
        for layer in layers_of(config, _KEEP_STATE)
        for name, shape in shapes.items()
    )
    return (StateGroupSpec(tensors),) if tensors else ()


def _delta_net(config: Any) -> Shapes:
    """One convolution over queries, keys and values; per head, a matrix from keys to values."""
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    heads = config.linear_num_value_heads
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    return {CONV: (channels, config.linear_conv_kernel_dim), RECURRENT: (heads, key_dim, value_dim)}


def _mamba2(config: Any) -> Shapes:
    """One convolution over x, B and C; per head, a state of `mamba_d_state` for each of its channels."""
    heads, head_dim = config.mamba_n_heads, config.mamba_d_head
    channels = heads * head_dim + 2 * config.mamba_n_groups * config.mamba_d_state
    return {CONV: (channels, config.mamba_d_conv), RECURRENT: (heads, head_dim, config.mamba_d_state)}


def _nemotron_mamba2(config: Any) -> Shapes:
    """The same by other names."""
    heads, head_dim = config.mamba_num_heads, config.mamba_head_dim
    channels = heads * head_dim + 2 * config.n_groups * config.ssm_state_size
    return {CONV: (channels, config.conv_kernel), RECURRENT: (heads, head_dim, config.ssm_state_size)}


def _short_conv(config: Any) -> Shapes:
    return {CONV: (config.hidden_size, config.conv_L_cache)}


def _some_attend(config: Any) -> None:
    if not (_ATTEND | {_SLIDE}) & set(config.layer_types):
        raise UnsupportedModel(
            "no layer in its layer_types attends: transformers' own generate refuses such a model",
            "use a model with a layer of full_attention",
        )
    check_named(config)


def _unbounded_time_step(config: Any) -> None:
    limit = config.time_step_limit
    if tuple(limit or ()) != (0.0, float("inf")):
        raise UnsupportedModel(
            f"time_step_limit is {limit} in config.json: transformers applies it in prompts, not in decode",
            "use a model whose time_step_limit is [0, Infinity]",
        )


def _pack_mixers(model: Any) -> None:
    """Wrap the mixer of every layer that keeps a state in a PackedMixer."""
    packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if cache_name := _MIXERS.get(type(child).__name__):
                setattr(module, name, PackedMixer(child, cache_name))
                packed += 1
    assert packed == sum(kind in _KEEP_STATE for kind in model.config.layer_types), "a mixer was not found"


def _prepare_falcon(model: Any) -> None:
    _pack_mixers(model)
    scale_logits(model, model.config.lm_head_multiplier)


def _prepare_kimi(model: Any) -> None:
    _pack_mixers(model)
    absorb(model, LatentAttention, unrotated)


def _prepare_bailing(model: Any) -> None:
    _pack_mixers(model)
    absorb(model, HeadGatedLatentAttention, rotate_pairs)


def _prepare_nemotron(model: Any) -> None:
    """transformers bounds the time steps of prompts by time_step_min, from which weights are drawn before
    training. The model's bounds are time_step_limit (0076)."""
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = tuple(model.config.time_step_limit)
    _pack_mixers(model)


def _prepare_granite(model: Any) -> None:
    _pack_mixers(model)
    divide_logits(model)


def _check_mamba2(config: Any) -> None:
    _unbounded_time_step(config)
    _some_attend(config)


def _check_kimi(config: Any) -> None:
    routed_by(config, "moe_layer_freq", 1)
    routed_by(config, "moe_router_activation_func", "sigmoid")
    if not getattr(config, "mla_use_nope", True):
        raise UnsupportedModel(
            "mla_use_nope is False in config.json: transformers rotates nothing in this model",
            "use a checkpoint whose latent layers know no positions",
        )
    _some_attend(config)


def _check_glm(config: Any) -> None:
    before = ""  # of the layer before, if it attends
    for layer, kind in enumerate(config.layer_types):
        indexer = config.indexer_types[layer] if kind in _ATTEND else ""
        if indexer == "shared" and before != "full":
            raise UnsupportedModel(
                f"layer {layer} goes on with a choice by config.json, and the one before makes none",
                "use a checkpoint with an indexer in the layer before",
            )
        before = indexer
    if not config.index_kpool_always_select_tail:
        raise UnsupportedModel(
            "index_kpool_always_select_tail is False in config.json: a query may see no token",
            "use a checkpoint in which it is True",
        )
    _some_attend(config)


def _without_masks(
    _decoder: Any, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """transformers would make masks of a pack that is one sequence to it."""
    masks = dict.fromkeys(("indexed_attention", "linear_attention"))
    return positional, {**keywords, "attention_mask": masks}


def _prepare_glm(model: Any) -> None:
    _pack_mixers(model)
    absorb(model, KPoolLatentAttention)
    model.model.register_forward_pre_hook(_without_masks, with_kwargs=True)


_LINEAR_OR_FULL = frozenset({"linear_attention", "full_attention"})


def _with_delta_nets(architecture: str) -> Family:
    return Family(
        architecture,
        _groups(_delta_net),
        layer_types=_LINEAR_OR_FULL,
        check=_some_attend,
        prepare=_pack_mixers,
    )


def _with_short_convolutions(architecture: str, *more: str) -> Family:
    return Family(
        architecture,
        _groups(_short_conv),
        layer_types=frozenset({"conv", "full_attention", *more}),
        check=_some_attend,
        prepare=_pack_mixers,
    )


FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        "BailingHybridForCausalLM",
        _kimi_groups,
        layer_types=_LINEAR_OR_FULL,
        allows=frozenset({"kv_lora_rank"}),
        check=_some_attend,
        prepare=_prepare_bailing,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        _groups(_mamba2),
        layer_types=_LINEAR_OR_FULL,
        check=_check_mamba2,
        prepare=_pack_mixers,
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        _groups(_mamba2),
        layer_types=frozenset({"hybrid"}),
        check=_unbounded_time_step,
        prepare=_prepare_falcon,
    ),
    "glm5_next_text": Family(
        "Glm5NextForCausalLM",
        _glm_groups,
        layer_types=frozenset({"linear_attention", "indexed_attention"}),
        allows=frozenset({"kv_lora_rank", "index_topk"}),
        check=_check_glm,
        prepare=_prepare_glm,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        _groups(_mamba2),
        layer_types=_LINEAR_OR_FULL,
        check=_check_mamba2,
        prepare=_prepare_granite,
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        _kimi_groups,
        layer_types=_LINEAR_OR_FULL,
        allows=frozenset({"kv_lora_rank"}),
        check=_check_kimi,
        prepare=_prepare_kimi,
    ),
    "lfm2": _with_short_convolutions("Lfm2ForCausalLM"),
    "lfm2_moe": _with_short_convolutions("Lfm2MoeForCausalLM"),
    "lfm3": _with_short_convolutions("Lfm3ForCausalLM", _SLIDE),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        _groups(_nemotron_mamba2),
        layer_types=_LINEAR_OR_FULL | {"mlp", "moe"},
        check=_check_mamba2,
        prepare=_prepare_nemotron,
    ),
    "olmo_hybrid": _with_delta_nets("OlmoHybridForCausalLM"),
    "qwen3_5_text": _with_delta_nets("Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": _with_delta_nets("Qwen3_5MoeForCausalLM"),
    "qwen3_next": _with_delta_nets("Qwen3NextForCausalLM"),
}
