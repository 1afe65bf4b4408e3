"""Random shapes of models: the keys of a config.json, by model type."""

from __future__ import annotations

import random
from typing import Any

from tests.support.tiny_configs import VOCAB_SIZE

Keys = dict[str, Any]
_POSITIONS = 1024
_HEADS = [
    (1, 1),
    (2, 1),
    (2, 2),
    (3, 1),
    (3, 3),
    (4, 1),
    (4, 2),
    (4, 4),
    (5, 5),
    (6, 2),
    (6, 3),
    (8, 2),
    (8, 8),
]
"""Of queries, and of keys and values."""


class ShapeDraw:
    """Draws the keys of one config.json."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.heads, self.kv_heads = rng.choice(_HEADS)
        self.head_dim = rng.choice([8, 16, 24, 32, 48, 64])
        self.layers = rng.randrange(1, 6)
        self.hidden = 8 * self.heads * rng.randrange(1, 1 + max(1, 12 // self.heads))  # heads divide it

    def common(self) -> Keys:
        """What every family has."""
        return {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": 8 * self.rng.randrange(2, 16),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": _POSITIONS,
            "bos_token_id": None,
            "eos_token_id": 258,
            "pad_token_id": None,
            "tie_word_embeddings": self.rng.random() < 0.4,
        }

    def rope(self, **more: Any) -> Keys:
        """One of the kinds of rotary embeddings that are served."""
        rng = self.rng
        kind = rng.choice(["default", "linear", "llama3", "yarn"])
        keys: Keys = {"rope_type": kind, "rope_theta": rng.choice([1e3, 1e4, 1e6]), **more}
        if kind != "default":
            keys["factor"] = rng.choice([2.0, 4.0, 8.0])
        if kind == "llama3":
            keys |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
        if kind in ("llama3", "yarn"):
            keys["original_max_position_embeddings"] = rng.choice([64, 256])
        return keys

    def window(self) -> int:
        """From a query that sees one token before it to one that sees whole prompts."""
        return self.rng.choice([2, 3, 7, 16, 17, 24, 33, 64, 400])

    def kinds(self, one: str, other: str, at_least: str) -> list[str]:
        """layer_types with a layer of `at_least` among them."""
        kinds = [self.rng.choice([one, other]) for _ in range(self.layers)]
        kinds[self.rng.randrange(self.layers)] = at_least
        return kinds

    def experts(self, number: str) -> Keys:
        """Experts, of which each token visits some."""
        count = self.rng.randrange(2, 9)
        return {
            number: count,
            "num_experts_per_tok": self.rng.randrange(1, count + 1),
            "moe_intermediate_size": 8 * self.rng.randrange(2, 8),
        }

    def flag(self) -> bool:
        return self.rng.random() < 0.5


def _llama(draw: ShapeDraw) -> Keys:
    return {"attention_bias": draw.flag(), "mlp_bias": draw.flag(), "rope_parameters": draw.rope()}


def _mistral(draw: ShapeDraw) -> Keys:
    return {"sliding_window": draw.window() if draw.flag() else None, "rope_parameters": draw.rope()}


def _qwen(draw: ShapeDraw) -> Keys:
    keys: Keys = {"rope_parameters": draw.rope()}
    if draw.flag():
        keys |= {
            "use_sliding_window": True,
            "sliding_window": draw.window(),
            "layer_types": draw.kinds("sliding_attention", "full_attention", "sliding_attention"),
        }
    return keys


def _qwen2(draw: ShapeDraw) -> Keys:
    return {**_qwen(draw), "hidden_size": draw.heads * draw.head_dim, "head_dim": draw.head_dim}


def _qwen3(draw: ShapeDraw) -> Keys:
    return {**_qwen(draw), "attention_bias": draw.flag()}


def _qwen3_moe(draw: ShapeDraw) -> Keys:
    dense = [layer for layer in range(draw.layers) if draw.rng.random() < 0.3]
    return {
        **draw.experts("num_experts"),
        "norm_topk_prob": draw.flag(),
        "mlp_only_layers": dense,
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _mixtral(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_local_experts")
    del experts["moe_intermediate_size"]
    return {**experts, **_mistral(draw)}


def _phi3(draw: ShapeDraw) -> Keys:
    """transformers takes other kinds of rotary embeddings for longrope."""
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "sliding_window": draw.window() if draw.flag() else None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.rng.choice([1e3, 1e4]),
            "partial_rotary_factor": draw.rng.choice([0.25, 0.5, 1.0]),
        },
    }


def _qwen2_moe(draw: ShapeDraw) -> Keys:
    return {
        **_qwen(draw),
        **draw.experts("num_experts"),
        "hidden_size": draw.heads * draw.head_dim,
        "shared_expert_intermediate_size": 8 * draw.rng.randrange(2, 8),
        "mlp_only_layers": [layer for layer in range(draw.layers) if draw.rng.random() < 0.3],
        "norm_topk_prob": draw.flag(),
        "qkv_bias": draw.flag(),
    }


def gemma2(draw: ShapeDraw) -> Keys:
    return {
        "query_pre_attn_scalar": draw.rng.choice([8, 24, 64]),
        "attn_logit_softcapping": draw.rng.choice([None, 2.0, 50.0]),
        "final_logit_softcapping": draw.rng.choice([None, 5.0, 30.0]),
        "attention_bias": draw.flag(),
        "sliding_window": draw.window(),
        "layer_types": draw.kinds("sliding_attention", "full_attention", "full_attention"),
        "rope_parameters": draw.rope(),
    }


def deepseek(draw: ShapeDraw) -> Keys:
    groups, in_group = draw.rng.choice([(1, 4), (2, 2), (2, 4), (4, 2)])
    chosen = draw.rng.randrange(1, groups + 1)
    experts = draw.experts("n_routed_experts") | {"n_routed_experts": groups * in_group}
    return {
        **experts,
        "num_experts_per_tok": draw.rng.randrange(1, chosen * in_group + 1),
        "num_key_value_heads": draw.heads,
        "q_lora_rank": draw.rng.choice([None, 16, 24]),
        "kv_lora_rank": draw.rng.choice([16, 32, 40]),
        "qk_rope_head_dim": draw.rng.choice([8, 16]),
        "qk_nope_head_dim": draw.rng.choice([8, 16, 24]),
        "v_head_dim": draw.rng.choice([8, 12, 16]),
        "n_shared_experts": draw.rng.randrange(1, 3),
        "n_group": groups,
        "topk_group": chosen,
        "first_k_dense_replace": draw.rng.randrange(0, draw.layers + 1),
        "routed_scaling_factor": draw.rng.choice([1.0, 2.0]),
    }


def _deepseek_v2(draw: ShapeDraw) -> Keys:
    return {**deepseek(draw), "topk_method": draw.rng.choice(["greedy", "group_limited_greedy"])}


def deepseek_v3(draw: ShapeDraw) -> Keys:
    return {
        **deepseek(draw),
        "norm_topk_prob": draw.flag(),
        "rope_interleave": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def of_kinds(keys: Keys, layers: int) -> Keys:
    """Shapes with a low rank of queries, whose layers of experts mlp_layer_types names."""
    dense = keys.pop("first_k_dense_replace")
    keys["q_lora_rank"] = keys["q_lora_rank"] or 16
    return {**keys, "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)}


def deepseek_v32(draw: ShapeDraw) -> Keys:
    """Few contexts have as many tokens as are chosen, most, or all."""
    keys = of_kinds(deepseek_v3(draw), draw.layers)
    del keys["rope_interleave"]
    return {
        **keys,
        "attention_bias": draw.flag(),
        "index_topk": draw.rng.choice([1, 8, 40, 150, 2048]),
        "index_n_heads": draw.rng.choice([12, 16, 20]),
        "index_head_dim": draw.rng.choice([16, 24, 32]),
    }


def _gemma3(draw: ShapeDraw) -> Keys:
    return {
        "query_pre_attn_scalar": draw.rng.choice([8, 24, 64]),
        "sliding_window": draw.window(),
        "layer_types": draw.kinds("sliding_attention", "full_attention", "full_attention"),
        "rope_parameters": {"full_attention": draw.rope(), "sliding_attention": draw.rope()},
    }


def gemma4(draw: ShapeDraw) -> Keys:
    """The last layer is a full one."""
    kinds = draw.kinds("sliding_attention", "full_attention", "full_attention")
    kinds[-1] = "full_attention"
    first = [kinds.index(kind) for kind in set(kinds)]
    experts = draw.experts("num_experts")
    experts["top_k_experts"] = experts.pop("num_experts_per_tok")
    mixture = {**experts, "enable_moe_block": True} if draw.flag() else {}
    shared = draw.rng.randrange(draw.layers - max(first))
    return {
        **mixture,
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": draw.flag(),
        "hidden_size_per_layer_input": draw.rng.choice([8, 16] if shared else [0, 8]),
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "global_head_dim": draw.rng.choice([16, 32, 64]),
        "num_global_key_value_heads": draw.rng.choice([None, 1, draw.heads]),
        "attention_k_eq_v": draw.flag(),
        "final_logit_softcapping": draw.rng.choice([None, 5.0, 30.0]),
        "attention_bias": draw.flag(),
        "sliding_window": draw.window(),
        "use_bidirectional_attention": draw.rng.choice([None, "vision"]),
    }


def _gpt_oss(draw: ShapeDraw) -> Keys:
    experts = draw.experts("num_local_experts")
    del experts["moe_intermediate_size"]
    return {
        **experts,
        "sliding_window": draw.window(),
        "layer_types": draw.kinds("sliding_attention", "full_attention", "full_attention"),
        "rope_parameters": draw.rope(),
    }


def delta_net(draw: ShapeDraw) -> Keys:
    key_heads = draw.rng.randrange(1, 4)
    return {
        "head_dim": draw.rng.choice([16, 32, 64]),  # a quarter of it is rotated, in pairs
        "layer_types": draw.kinds("linear_attention", "full_attention", "full_attention"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.rng.randrange(1, 4),
        "linear_key_head_dim": draw.rng.choice([8, 16]),
        "linear_value_head_dim": draw.rng.choice([8, 12, 16]),
        "linear_conv_kernel_dim": draw.rng.choice([2, 3, 4]),
        "rope_parameters": draw.rope(partial_rotary_factor=draw.rng.choice([0.25, 0.5, 1.0])),
    }


def _qwen3_next(draw: ShapeDraw) -> Keys:
    return {
        **delta_net(draw),
        **draw.experts("num_experts"),
        "shared_expert_intermediate_size": 8 * draw.rng.randrange(2, 8),
        "mlp_only_layers": [layer for layer in range(draw.layers) if draw.rng.random() < 0.3],
        "norm_topk_prob": draw.flag(),
    }


def _qwen3_5_moe(draw: ShapeDraw) -> Keys:
    return {
        **delta_net(draw),
        **draw.experts("num_experts"),
        "shared_expert_intermediate_size": 8 * draw.rng.randrange(2, 8),
    }


def _falcon_h1(draw: ShapeDraw) -> Keys:
    heads, head_dim = draw.rng.choice([(2, 16), (4, 8), (4, 16), (6, 16)])
    return {
        "mamba_d_ssm": heads * head_dim,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": draw.rng.choice([1, 2]),
        "mamba_d_state": draw.rng.choice([8, 12, 16]),
        "mamba_d_conv": draw.rng.choice([2, 4]),
        "mamba_chunk_size": draw.rng.choice([8, 16, 256]),
        "mamba_rms_norm": draw.flag(),
        "mamba_norm_before_gate": draw.flag(),
        "projectors_bias": draw.flag(),
        "key_multiplier": draw.rng.choice([0.9, 1.0]),
        "lm_head_multiplier": draw.rng.choice([0.5, 1.0]),
        "ssm_multipliers": [draw.rng.choice([0.7, 0.9, 1.0, 1.2]) for _ in range(5)],
    }


def lfm2(draw: ShapeDraw) -> Keys:
    return {
        "hidden_size": draw.heads * draw.head_dim,
        "conv_bias": draw.flag(),
        "conv_L_cache": draw.rng.choice([2, 3, 4]),
        "block_auto_adjust_ff_dim": False,
        "layer_types": draw.kinds("conv", "full_attention", "full_attention"),
    }


def _lfm3(draw: ShapeDraw) -> Keys:
    """Three kinds of layers."""
    kinds = draw.kinds("conv", "sliding_attention", draw.rng.choice(["full_attention", "sliding_attention"]))
    return {
        "conv_bias": draw.flag(),
        "conv_L_cache": draw.rng.choice([2, 4, 7]),
        "sliding_window": draw.window(),
        "layer_types": ["full_attention" if draw.rng.random() < 0.3 else kind for kind in kinds],
        "use_sandwich_norm": draw.flag(),
        "use_attention_gate": draw.flag(),
        "attention_bias": draw.flag(),
        "rope_parameters": {"full_attention": draw.rope(), "sliding_attention": draw.rope()},
    }


def _llama4(draw: ShapeDraw) -> Keys:
    """Pages have to divide a chunk."""
    experts = draw.experts("num_local_experts")
    del experts["moe_intermediate_size"]
    return {
        **experts,
        "intermediate_size_mlp": 8 * draw.rng.randrange(2, 16),
        "moe_layers": [layer for layer in range(draw.layers) if draw.flag()],
        "no_rope_layers": [int(draw.flag()) for _ in range(draw.layers)],
        "attention_chunk_size": draw.rng.choice([16, 48, 64, 400]),
        "use_qk_norm": draw.flag(),
        "attn_temperature_tuning": draw.flag(),
        "floor_scale": draw.rng.choice([4, 30, 8192]),
        "attn_scale": draw.rng.choice([0.1, 0.7]),
        "attention_bias": draw.flag(),
        "rope_parameters": draw.rope(),
    }


def _kimi_linear(draw: ShapeDraw) -> Keys:
    """Latents whose keys are not rotated, and states."""
    keys = deepseek(draw)
    dense = keys.pop("first_k_dense_replace")
    shared = {"num_local_experts": keys.pop("n_routed_experts")}
    return {
        **keys,
        **shared,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(draw.layers)],
        "layer_types": draw.kinds("linear_attention", "full_attention", "full_attention"),
        "linear_num_heads": draw.rng.randrange(1, 5),
        "linear_head_dim": draw.rng.choice([8, 16, 24]),
        "linear_conv_kernel_dim": draw.rng.choice([2, 3, 4]),
    }


def _deepseek_v4(draw: ShapeDraw) -> Keys:
    """An entry needs no more tokens than the window has, and both indexer and heads rotate as many values."""
    rng = draw.rng
    rates = {
        "compressed_sparse_attention": rng.choice([2, 4]),
        "heavily_compressed_attention": rng.choice([2, 8, 16]),
    }
    return {
        **draw.experts("n_routed_experts"),
        "num_key_value_heads": 1,
        "q_lora_rank": 8 * rng.randrange(1, 5),
        "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
        "sliding_window": max(draw.window(), 2 * rates["compressed_sparse_attention"], *rates.values()),
        "compress_rates": rates,
        "layer_types": [rng.choice([*rates, "sliding_attention"]) for _ in range(draw.layers)],
        "mlp_layer_types": [rng.choice(["hash_moe", "moe"]) for _ in range(draw.layers)],
        "scoring_func": rng.choice(["sqrtsoftplus", "sigmoid"]),
        "swiglu_limit": rng.choice([0.5, 10.0]),
        "o_groups": rng.choice([n for n in (1, 2, 4) if draw.heads % n == 0]),
        "o_lora_rank": 8 * rng.randrange(1, 4),
        "index_n_heads": 16,
        "index_head_dim": draw.head_dim + 8 * rng.randrange(3),
        "index_topk": rng.choice([1, 6, 400]),
        "hc_mult": rng.choice([1, 2, 4]),
        "hc_sinkhorn_iters": rng.choice([1, 3]),
        "rope_parameters": draw.rope(),
    }


def _minimax_m3(draw: ShapeDraw) -> Keys:
    """Blocks of any size, and indexers with heads for one query head or several."""
    rng, experts = draw.rng, draw.experts("num_local_experts")
    top = rng.choice([1, 2, 3, 100])
    return {
        "num_local_experts": experts["num_local_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "dense_intermediate_size": 8 * rng.randrange(2, 8),
        "shared_intermediate_size": 8 * rng.randrange(2, 6),
        "swiglu_limit": rng.choice([0.5, 7.0]),
        "layer_types": [rng.choice(["full_attention", "minimax_m3_sparse"]) for _ in range(draw.layers)],
        "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(draw.layers)],
        "index_n_heads": rng.choice([n for n in (1, 2, 3, 4, 6) if draw.heads % n == 0]),
        "index_head_dim": rng.choice([draw.head_dim, 2 * draw.head_dim, 16, 24]),
        "index_block_size": rng.choice([4, 6, 16, 32]),
        "index_topk_blocks": top,
        "index_local_blocks": rng.randrange(min(top, 3) + 1),
        "rope_parameters": {**draw.rope(), "partial_rotary_factor": rng.choice([0.5, 1.0])},
    }


def _bailing(draw: ShapeDraw) -> Keys:
    """Its delta attention has the heads of its config."""
    keys = _kimi_linear(draw)
    for other in ("q_lora_rank", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        del keys[other]
    return {
        **keys,
        "short_conv_kernel_size": draw.rng.choice([2, 3, 4]),
        "kda_safe_gate": draw.flag(),
        "kda_lower_bound": draw.rng.choice([-5.0, -1.0]),
        "rope_parameters": draw.rope(),
    }


def _glm5_next(draw: ShapeDraw) -> Keys:
    """Pools of any size, of which few contexts have as many as are chosen, most, or all."""
    rng, keys = draw.rng, _kimi_linear(draw)
    pool = rng.choice([1, 4, 6, 16])
    kinds = draw.kinds("linear_attention", "indexed_attention", "indexed_attention")
    indexers = [rng.choice(["full", "full", "shared"]) for _ in kinds]
    for layer, kind in enumerate(kinds):
        if layer == 0 or kinds[layer - 1] != kind or indexers[layer - 1] == "shared":
            indexers[layer] = "full"
    for other in ("qk_rope_head_dim", "head_dim", "first_k_dense_replace", "rope_parameters"):
        keys.pop(other, None)
    return {
        **keys,
        "q_lora_rank": 8 * rng.randrange(1, 5),
        "layer_types": kinds,
        "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(draw.layers)],
        "indexer_types": indexers,
        "linear_lower_bound": rng.choice([None, -5.0, -1.0]),
        "swiglu_limit": rng.choice([0.5, 10.0]),
        "hc_mult": rng.choice([1, 2, 4]),
        "hc_sinkhorn_iters": rng.choice([1, 3]),
        "index_topk": pool * rng.choice([1, 2, 9, 200]),
        "index_n_heads": rng.choice([12, 16, 20]),
        "index_head_dim": rng.choice([16, 24, 32]),
        "index_kpool": pool,
    }


SHAPES = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "gemma2": gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": gemma4,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": delta_net,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "falcon_h1": _falcon_h1,
    "lfm2": lfm2,
    "lfm3": _lfm3,
    "llama4_text": _llama4,
    "kimi_linear": _kimi_linear,
    "deepseek_v4": _deepseek_v4,
    "minimax_m3_vl_text": _minimax_m3,
    "bailing_hybrid": _bailing,
    "glm5_next_text": _glm5_next,
}
"""model_type -> the keys beside those that all have."""
