"""Random shapes of the families that differ from another in their layers alone."""

from __future__ import annotations

from tests.support.random_shapes import (
    Keys,
    ShapeDraw,
    deepseek,
    deepseek_v3,
    deepseek_v32,
    delta_net,
    gemma2,
    gemma4,
    lfm2,
    of_kinds,
)
from tests.support.tiny_configs import VOCAB_SIZE

_HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def _cohere2(draw: ShapeDraw) -> Keys:
    return {
        **_windowed(draw),
        "logit_scale": draw.rng.choice([0.0625, 0.5, 1.0]),
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _derived(draw: ShapeDraw) -> Keys:
    """The width of a head is derived."""
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _flex_olmo(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_experts")
    experts["intermediate_size"] = experts.pop("moe_intermediate_size")
    return {**_derived(draw), **experts, "norm_topk_prob": draw.flag()}


def _helium(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _internlm3(draw: ShapeDraw) -> Keys:
    """One setting for all biases."""
    biases = draw.flag()
    return {"attention_bias": biases, "mlp_bias": biases, "rope_parameters": draw.rope()}


def _hy_v4(draw: ShapeDraw) -> Keys:
    keys = {**deepseek_v32(draw), **draw.experts("n_routed_experts")}
    for other in ("n_group", "topk_group"):
        del keys[other]
    return {
        **keys,
        "indexer_types": ["full", *(draw.rng.choice(["full", "shared"]) for _ in range(draw.layers - 1))],
        "hc_mult": draw.rng.choice([1, 2, 4]),
        "swiglu_limit": draw.rng.choice([0.3, 10.0]),
    }


def _iquestcoder(draw: ShapeDraw) -> Keys:
    return {"attention_bias": draw.flag(), "mlp_bias": draw.flag(), "rope_parameters": draw.rope()}


def _minicpm3(draw: ShapeDraw) -> Keys:
    latents = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    keys = deepseek(draw)
    return {
        **{key: keys[key] for key in latents},
        "num_key_value_heads": draw.heads,
        "scale_emb": draw.rng.choice([1, 12]),
        "scale_depth": draw.rng.choice([None, 1.4]),
        "dim_model_base": draw.rng.choice([None, 8, 256]),
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _axk2(draw: ShapeDraw) -> Keys:
    return {**deepseek_v32(draw), "gated_norm_rank": draw.rng.choice([4, 8])}


def _cohere(draw: ShapeDraw) -> Keys:
    return {
        **_derived(draw),
        "logit_scale": draw.rng.choice([0.0625, 0.5, 1.0]),
        "use_qk_norm": draw.flag(),
    }


def _hunyuan(draw: ShapeDraw) -> Keys:
    alpha = draw.rng.choice([2.0, 1000.0])
    fixed = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": alpha}
    return {"attention_bias": draw.flag(), "rope_parameters": fixed if draw.flag() else draw.rope()}


def _hunyuan_moe(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_experts")
    return {
        **_hunyuan(draw),
        "num_experts": experts["num_experts"],
        "moe_topk": experts["num_experts_per_tok"],
    }


def _cohere2_moe(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_experts")
    del experts["moe_intermediate_size"]
    return {
        **experts,
        "sliding_window": draw.window(),
        "layer_types": draw.kinds("sliding_attention", "full_attention", "full_attention"),
        "mlp_layer_types": [draw.rng.choice(["dense", "sparse"]) for _ in range(draw.layers)],
        "prefix_dense_sliding_window_pattern": draw.rng.choice([1, 4]),
        "prefix_dense_intermediate_size": 8 * draw.rng.randrange(2, 16),
        "num_shared_experts": draw.rng.randrange(3),
        "shared_expert_combination_strategy": draw.rng.choice(["average", "sum"]),
        "expert_selection_fn": draw.rng.choice(["softmax", "sigmoid"]),
        "norm_topk_prob": draw.flag(),
        "rms_norm_eps": draw.rng.choice([None, 1e-5]),
        "logit_scale": draw.rng.choice([0.0625, 1.0]),
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _mimo(draw: ShapeDraw) -> Keys:
    """Layers with a window have twice as many heads of keys and values."""
    kinds = draw.kinds("sliding_attention", "full_attention", "full_attention")
    return {
        "num_attention_heads": 2 * draw.heads,
        "v_head_dim": draw.rng.choice([8, 16, 40]),
        "sliding_window": draw.window(),
        "layer_types": kinds,
        "mlp_layer_types": [draw.rng.choice(["dense", "sparse"]) for _ in kinds],
        **draw.experts("n_routed_experts"),
        "attention_value_scale": draw.rng.choice([None, 0.7]),
        "attention_bias": draw.flag(),
        "rope_parameters": {
            kind: draw.rope(partial_rotary_factor=draw.rng.choice([0.5, 1.0]))
            for kind in ("sliding_attention", "full_attention")
        },
    }


def _windowed(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "sliding_window": draw.window(),
        "layer_types": draw.kinds("sliding_attention", "full_attention", "full_attention"),
    }


def _ernie(draw: ShapeDraw) -> Keys:
    return {"use_bias": draw.flag(), "rope_parameters": draw.rope()}


def _ernie_moe(draw: ShapeDraw) -> Keys:
    experts = draw.experts("moe_num_experts")
    experts["moe_k"] = experts.pop("num_experts_per_tok")
    return {
        **_ernie(draw),
        **experts,
        "hidden_size": draw.heads * draw.head_dim,
        "moe_num_shared_experts": draw.rng.randrange(3),
        "moe_layer_start_index": draw.rng.randrange(draw.layers),
        "moe_layer_interval": draw.rng.randrange(1, 3),
    }


def _gemma(draw: ShapeDraw) -> Keys:
    return {"attention_bias": draw.flag(), "rope_parameters": draw.rope()}


def _half_rotary(draw: ShapeDraw) -> Keys:
    """Half of a head is rotated, in pairs."""
    return {
        "head_dim": draw.rng.choice([8, 16, 24]),
        "attention_bias": draw.flag(),
        "rope_parameters": _HALF_ROTARY,
    }


def _routed(draw: ShapeDraw) -> Keys:
    """Experts in groups."""
    keys = deepseek(draw)
    routing = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group")
    others = ("moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor")
    return {**{name: keys[name] for name in (*routing, *others)}, "norm_topk_prob": draw.flag()}


def _glm4_moe(draw: ShapeDraw) -> Keys:
    return {**_routed(draw), **_half_rotary(draw), "use_qk_norm": draw.flag()}


def _dots1(draw: ShapeDraw) -> Keys:
    windowed = {key: value for key, value in _windowed(draw).items() if key != "hidden_size"}
    if draw.flag():
        windowed = {"sliding_window": None, "layer_types": ["full_attention"] * draw.layers}
    return {**_routed(draw), **windowed, "attention_bias": draw.flag(), "rope_parameters": draw.rope()}


def _solar_open(draw: ShapeDraw) -> Keys:
    keys = _routed(draw)
    del keys["first_k_dense_replace"]
    return {**keys, "attention_bias": draw.flag(), "rope_parameters": draw.rope()}


def _shared_experts(draw: ShapeDraw) -> Keys:
    return {**draw.experts("num_experts"), "num_shared_experts": draw.rng.randrange(1, 3)}


def _afmoe(draw: ShapeDraw) -> Keys:
    return {
        **_windowed(draw),
        **_shared_experts(draw),
        "num_dense_layers": draw.rng.randrange(draw.layers + 1),
        "route_scale": draw.rng.choice([1.0, 2.0]),
        "mup_enabled": draw.flag(),
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _hy_v3(draw: ShapeDraw) -> Keys:
    return {
        **_shared_experts(draw),
        "mlp_layer_types": draw.kinds("dense", "sparse", "sparse"),
        "router_scaling_factor": draw.rng.choice([1.0, 2.8]),
        "enable_moe_fp32_combine": draw.flag(),
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _mistral4(draw: ShapeDraw) -> Keys:
    """Queries grow with their positions."""
    return {
        **deepseek(draw),
        "norm_topk_prob": draw.flag(),
        "rope_interleave": draw.flag(),
        "rope_parameters": {**_ministral3(draw)["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 0.8},
    }


def _mistral_large(draw: ShapeDraw) -> Keys:
    """A layer may read the latents of the last one of its kind that has some."""
    rng, keys = draw.rng, _glm_moe_dsa(draw)
    for other in ("q_lora_rank", "norm_topk_prob", "attention_bias"):
        del keys[other]
    rotates = [rng.choice([0, 1, 1]) for _ in range(draw.layers)]
    sources: list[int] = []
    last: dict[int, int] = {}
    for layer, kind in enumerate(rotates):
        if kind not in last or draw.flag():
            last[kind] = layer
        sources.append(last[kind])
    return {
        **keys,
        "no_rope_layers": rotates,
        "kv_source_layers": sources,
        "final_logit_softcapping": rng.choice([6.0, 30.0]),
    }


def _glm4_moe_lite(draw: ShapeDraw) -> Keys:
    return of_kinds(deepseek_v3(draw), draw.layers)


def _glm_moe_dsa(draw: ShapeDraw) -> Keys:
    kinds = ["full", *(draw.rng.choice(["full", "shared"]) for _ in range(draw.layers - 1))]
    return {**deepseek_v32(draw), "indexer_types": kinds}


def _gemma4_unified(draw: ShapeDraw) -> Keys:
    keys = gemma4(draw)
    mixture = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", *mixture):
        keys.pop(key, None)
    return keys


def _granite(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "embedding_multiplier": draw.rng.choice([1.0, 2.0]),
        "logits_scaling": draw.rng.choice([1.0, 3.0, 8.0]),
        "residual_multiplier": draw.rng.choice([0.5, 1.0]),
        "attention_multiplier": draw.rng.choice([0.1, 0.3]),
        "rope_parameters": draw.rope(),
    }


def _granite_moe(draw: ShapeDraw) -> Keys:
    keys = _granite(draw)
    del keys["mlp_bias"]
    experts = draw.experts("num_local_experts")
    experts["intermediate_size"] = experts.pop("moe_intermediate_size")
    return {**keys, **experts}


def _granite_moe_shared(draw: ShapeDraw) -> Keys:
    return {**_granite_moe(draw), "shared_intermediate_size": 8 * draw.rng.randrange(8)}


def _granite_swa(draw: ShapeDraw) -> Keys:
    """Each layer rotates as it is told; 0: not at all."""
    thetas = [draw.rng.choice([0, 500.0, 10000.0]) for _ in range(draw.layers)]
    return {**_granite(draw), **_windowed(draw), "layer_rope_theta": thetas}


def _granitemoe_swa(draw: ShapeDraw) -> Keys:
    keys = _granite_swa(draw)
    del keys["mlp_bias"]
    return {**keys, **_granite_moe_shared(draw)}


def _bamba(draw: ShapeDraw) -> Keys:
    attend = [layer for layer in range(draw.layers) if draw.flag()] or [draw.layers - 1]
    return {
        **_derived(draw),
        "attn_layer_indices": attend,
        "mamba_n_heads": draw.heads,
        "mamba_n_groups": 1,
        "mamba_d_state": draw.rng.choice([8, 12, 16]),
        "mamba_d_conv": draw.rng.choice([2, 4]),
        "mamba_chunk_size": draw.rng.choice([8, 16, 256]),
        "mamba_conv_bias": draw.flag(),
        "mamba_proj_bias": draw.flag(),
        "rope_parameters": draw.rope(partial_rotary_factor=0.5),
    }


def _gemma3n(draw: ShapeDraw) -> Keys:
    kinds = draw.kinds("sliding_attention", "full_attention", "full_attention")
    first = [kinds.index(kind) for kind in set(kinds)]
    return {
        "layer_types": kinds,
        "num_kv_shared_layers": draw.rng.randrange(draw.layers - max(first)),
        "hidden_size_per_layer_input": draw.rng.choice([8, 16]),
        "vocab_size_per_layer_input": VOCAB_SIZE - draw.rng.choice([0, 20]),
        "laurel_rank": draw.rng.choice([4, 8]),
        "altup_num_inputs": draw.rng.choice([2, 4]),
        "altup_correct_scale": draw.flag(),
        "activation_sparsity_pattern": [draw.rng.choice([0.0, 0.5, 0.9]) for _ in kinds],
        "final_logit_softcapping": draw.rng.choice([5.0, 30.0]),
        "sliding_window": draw.window(),
    }


def _granite_hybrid(draw: ShapeDraw) -> Keys:
    keys = _granite(draw)
    del keys["mlp_bias"]
    experts = draw.experts("num_local_experts")
    del experts["moe_intermediate_size"]
    if draw.flag():
        experts["num_local_experts"] = 0
    return {
        **keys,
        **experts,
        "layer_types": draw.kinds("linear_attention", "full_attention", "full_attention"),
        "shared_intermediate_size": 8 * draw.rng.randrange(2, 8),
        "position_embedding_type": draw.rng.choice(["rope", "nope"]),
        "mamba_n_heads": draw.heads,
        "mamba_d_state": draw.rng.choice([8, 12, 16]),
        "mamba_d_conv": draw.rng.choice([2, 4]),
        "mamba_chunk_size": draw.rng.choice([8, 16, 256]),
        "mamba_conv_bias": draw.flag(),
        "mamba_proj_bias": draw.flag(),
    }


def _minimax(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_local_experts")
    del experts["moe_intermediate_size"]
    rotary = _half_rotary(draw)
    del rotary["attention_bias"]
    return {**experts, **rotary}


def _ministral3(draw: ShapeDraw) -> Keys:
    """Queries grow with their positions."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "sliding_window": draw.window() if draw.flag() else None,
        "rope_parameters": {**rope, "llama_4_scaling_beta": draw.rng.choice([0.1, 0.5])},
    }


def _olmo3(draw: ShapeDraw) -> Keys:
    return {
        **_windowed(draw),
        "attention_bias": draw.flag(),
        "rope_parameters": {"full_attention": draw.rope(), "sliding_attention": draw.rope()},
    }


def _olmo_hybrid(draw: ShapeDraw) -> Keys:
    """Its config asks for a layer of each kind."""
    keys = delta_net(draw)
    kinds = [*keys["layer_types"], "linear_attention"]
    return {
        **keys,
        **_derived(draw),
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "linear_allow_neg_eigval": draw.flag(),
        "rope_parameters": draw.rope() if draw.flag() else None,
    }


def _exaone4(draw: ShapeDraw) -> Keys:
    if draw.flag():
        full = {"sliding_window": None, "layer_types": ["full_attention"] * draw.layers}
        return {**full, "rope_parameters": draw.rope()}
    return {**_windowed(draw), "rope_parameters": draw.rope()}


def _exaone_moe(draw: ShapeDraw) -> Keys:
    experts = _routed(draw)
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    return {
        **_windowed(draw),
        **{names.get(name, name): value for name, value in experts.items()},
        "rope_parameters": draw.rope(),
    }


def _seed_oss(draw: ShapeDraw) -> Keys:
    biases = {name: draw.flag() for name in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return {**biases, "rope_parameters": draw.rope()}


def _smollm3(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "no_rope_layers": [draw.rng.randrange(2) for _ in range(draw.layers)],
        "use_sliding_window": (windowed := draw.flag()),
        "sliding_window": draw.window() if windowed else None,
        "attention_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _apertus(draw: ShapeDraw) -> Keys:
    return {**_derived(draw), "num_key_value_heads": draw.rng.choice([1, draw.heads])}


def _arcee(draw: ShapeDraw) -> Keys:
    return {**_biased(draw), "hidden_act": draw.rng.choice(["relu2", "silu"])}


def _biased(draw: ShapeDraw) -> Keys:
    return {"attention_bias": draw.flag(), "mlp_bias": draw.flag(), "rope_parameters": draw.rope()}


def _axk1(draw: ShapeDraw) -> Keys:
    keys = deepseek_v3(draw)
    keys["q_lora_rank"] = keys["q_lora_rank"] or 24
    return of_kinds(keys, draw.layers)


def _cwm(draw: ShapeDraw) -> Keys:
    return {**_windowed(draw), "bos_token_id": 257, "rope_parameters": draw.rope()}


def _hyperclovax(draw: ShapeDraw) -> Keys:
    keys = {key: value for key, value in _granite(draw).items() if key != "hidden_size"}
    return {**keys, "use_post_norm": draw.flag()}


def _kolibri1(draw: ShapeDraw) -> Keys:
    return {
        **_windowed(draw),
        **draw.experts("num_experts"),
        "shared_expert_intermediate_size": 8 * draw.rng.randrange(2, 8),
        "norm_topk_prob": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _laguna(draw: ShapeDraw) -> Keys:
    """Full layers and those with a window differ in their query heads."""
    windowed = _windowed(draw)
    heads = {"full_attention": draw.heads, "sliding_attention": draw.kv_heads * draw.rng.randrange(1, 4)}
    return {
        **windowed,
        **draw.experts("num_experts"),
        "shared_expert_intermediate_size": 8 * draw.rng.randrange(2, 8),
        "num_attention_heads_per_layer": [heads[kind] for kind in windowed["layer_types"]],
        "mlp_layer_types": draw.kinds("dense", "sparse", "sparse"),
        "gating": draw.rng.choice([True, "per-element"]),
        "moe_routed_scaling_factor": draw.rng.choice([1.0, 2.5]),
        "moe_router_logit_softcapping": draw.rng.choice([0.0, 2.0]),
        "attention_bias": draw.flag(),
        "rope_parameters": {"full_attention": draw.rope(), "sliding_attention": draw.rope()},
    }


def _step(draw: ShapeDraw) -> Keys:
    """The same, with limits of some layers."""
    windowed, rng = _windowed(draw), draw.rng
    limits = [[rng.choice([None, 0.0, 0.5]) for _ in range(draw.layers)] for _ in range(2)]
    return {
        **windowed,
        **draw.experts("n_routed_experts"),
        "pad_token_id": 0,
        "num_sliding_attention_heads": rng.choice([None, draw.kv_heads * rng.randrange(1, 4)]),
        "share_expert_dim": 8 * rng.randrange(2, 8),
        "mlp_layer_types": draw.kinds("dense", "sparse", "sparse"),
        "moe_router_scaling_factor": rng.choice([1.0, 2.5]),
        "swiglu_limits": limits[0],
        "swiglu_limits_shared": limits[1],
        "attention_bias": draw.flag(),
        "rope_parameters": {"full_attention": draw.rope(), "sliding_attention": draw.rope()},
    }


def _mellum(draw: ShapeDraw) -> Keys:
    return {
        **_windowed(draw),
        **draw.experts("num_experts"),
        "mlp_layer_types": draw.kinds("dense", "sparse", "sparse"),
        "norm_topk_prob": draw.flag(),
        "rope_parameters": {"full_attention": draw.rope(), "sliding_attention": draw.rope()},
    }


def _olmoe(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_experts")
    experts["intermediate_size"] = experts.pop("moe_intermediate_size")
    clip = draw.rng.choice([None, 1.0])
    return {**_derived(draw), **experts, "clip_qkv": clip, "norm_topk_prob": draw.flag()}


def _starcoder2(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "sliding_window": draw.window() if draw.flag() else None,
        "use_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _youtu(draw: ShapeDraw) -> Keys:
    keys = deepseek_v3(draw)
    for key in (*_routed(draw), "norm_topk_prob"):
        keys.pop(key, None)
    return keys


def _lfm2_moe(draw: ShapeDraw) -> Keys:
    keys = lfm2(draw)
    del keys["block_auto_adjust_ff_dim"]
    return {
        **keys,
        **draw.experts("num_experts"),
        "num_dense_layers": draw.rng.randrange(draw.layers + 1),
        "use_expert_bias": draw.flag(),
        "norm_topk_prob": draw.flag(),
        "routed_scaling_factor": draw.rng.choice([1.0, 2.0]),
    }


def _ministral(draw: ShapeDraw) -> Keys:
    keys = _windowed(draw)
    del keys["hidden_size"]
    return {**keys, "rope_parameters": draw.rope()}


def _nanochat(draw: ShapeDraw) -> Keys:
    return {
        **_derived(draw),
        "final_logit_softcapping": draw.rng.choice([None, 6.0]),
    }


def _nemotron(draw: ShapeDraw) -> Keys:
    return {**_half_rotary(draw), "mlp_bias": draw.flag()}


def _nemotron_h(draw: ShapeDraw) -> Keys:
    """A layer is one mixer."""
    kinds = [
        draw.rng.choice(["linear_attention", "full_attention", "mlp", "moe"]) for _ in range(draw.layers + 1)
    ]
    kinds[draw.rng.randrange(len(kinds))] = "full_attention"
    heads, head_dim = draw.rng.choice([(2, 16), (4, 8), (4, 16), (6, 16)])
    return {
        **draw.experts("n_routed_experts"),
        "layer_types": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": draw.rng.choice([1, 2]),
        "ssm_state_size": draw.rng.choice([8, 12, 16]),
        "conv_kernel": draw.rng.choice([2, 4]),
        "chunk_size": draw.rng.choice([8, 16, 256]),
        "use_conv_bias": draw.flag(),
        "use_bias": draw.flag(),
        "mlp_bias": draw.flag(),
        "moe_shared_expert_intermediate_size": 8 * draw.rng.randrange(2, 8),
        "moe_latent_size": draw.rng.choice([None, 16, 24]),
        "norm_topk_prob": draw.flag(),
        "routed_scaling_factor": draw.rng.choice([1.0, 2.5]),
        "time_step_min": 1e-30,  # transformers' bound in prompts
    }


def _olmo(draw: ShapeDraw) -> Keys:
    return {**_derived(draw), "clip_qkv": draw.rng.choice([None, 1.0])}


def _stablelm(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "use_qkv_bias": draw.flag(),
        "qk_layernorm": draw.flag(),
        "use_parallel_residual": draw.flag(),
        "rope_parameters": _HALF_ROTARY,
    }


SIMILAR_SHAPES = {
    "afmoe": _afmoe,
    "apertus": _apertus,
    "arcee": _arcee,
    "axk1": _axk1,
    "axk2": _axk2,
    "flex_olmo": _flex_olmo,
    "helium": _helium,
    "internlm3": _internlm3,
    "hy_v4": _hy_v4,
    "iquestcoder": _iquestcoder,
    "minicpm3": _minicpm3,
    "vaultgemma": gemma2,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "cwm": _cwm,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_moe,
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "gemma": _gemma,
    "gemma4_unified_text": _gemma4_unified,
    "glm": _half_rotary,
    "glm4": _half_rotary,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
    "granite": _granite,
    "granite_swa": _granite_swa,
    "granitemoe": _granite_moe,
    "granitemoe_swa": _granitemoe_swa,
    "bamba": _bamba,
    "gemma3n_text": _gemma3n,
    "granitemoehybrid": _granite_hybrid,
    "granitemoeshared": _granite_moe_shared,
    "hy_v3": _hy_v3,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_moe,
    "hyperclovax": _hyperclovax,
    "jais2": _biased,
    "kolibri1": _kolibri1,
    "laguna": _laguna,
    "step3p5": _step,
    "lfm2_moe": _lfm2_moe,
    "mellum": _mellum,
    "minimax_m2": _minimax,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "mistral4": _mistral4,
    "mistral_large4_text": _mistral_large,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "nemotron_h": _nemotron_h,
    "olmo": _olmo,
    "olmo2": _derived,
    "olmo3": _olmo3,
    "olmo_hybrid": _olmo_hybrid,
    "olmoe": _olmoe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "solar_open": _solar_open,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "youtu": _youtu,
    "mimo_v2_flash": _mimo,
    "cohere2_moe": _cohere2_moe,
}
"""model_type -> the keys beside those that all have."""
