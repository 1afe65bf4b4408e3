"""Configs of the tiny models: a few layers of every supported family, features switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    AXK1Config,
    AXK2Config,
    BailingHybridConfig,
    BambaConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Glm5NextTextConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    HYV4Config,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    KimiLinearConfig,
    Kolibri1Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MistralLarge4TextConfig,
    MixtralConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    Step3p7TextConfig,
    VaultGemmaConfig,
    YoutuConfig,
)

VOCAB_SIZE = 320
"""256 bytes, 3 special tokens, 61 pairs of letters: every id a model can sample has a text."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama_bias": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3),
    "llama_yarn": lambda: LlamaConfig(**{**COMMON, "num_key_value_heads": 4}, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in COMMON.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**{**COMMON, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: Phi3Config(
        **_without("head_dim"),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "seed_oss": lambda: SeedOssConfig(**COMMON, attention_bias=True, attention_out_bias=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_without("head_dim"),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
}
"""Families and variants; the part before "_" is not always the model_type."""

WINDOW = 24
CHUNK = 32
"""Of the tiny models with one: it bites in short contexts, and is no whole number of 16-token pages."""
_SLIDING = ["sliding_attention", "full_attention"] * 2
_GEMMA4: dict[str, Any] = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 6.0,
    "sliding_window": WINDOW,
}
_LINEAR = ["linear_attention", "full_attention"] * 2


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in names}


def _deepseek(**more: Any) -> dict[str, Any]:
    """Two dense layers, then two with experts in two groups."""
    return {
        **_without("head_dim"),
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        **more,
    }


def _deepseek_of_kinds(**more: Any) -> dict[str, Any]:
    """The same where mlp_layer_types says which layers are dense."""
    keys = _deepseek(q_lora_rank=24, **more)
    del keys["first_k_dense_replace"]
    return keys


def _sparse(**more: Any) -> dict[str, Any]:
    """The same with an indexer that chooses 24 tokens, fewer than most contexts have. With fewer heads the
    scores of several tokens would be 0, and none of them clearly better."""
    return _deepseek_of_kinds(
        index_topk=24,
        index_n_heads=16,
        index_head_dim=16,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        **more,
    )


def _delta_net(**more: Any) -> dict[str, Any]:
    """Gated delta nets with fewer keys than values, and gated attention that rotates half a head."""
    return {
        **COMMON,
        "num_hidden_layers": 4,
        "layer_types": _LINEAR,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **more,
    }


_LATENTS_AND_STATES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "layer_types": _LINEAR,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}

MIXED: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek_v2": lambda: DeepseekV2Config(
        **_deepseek(q_lora_rank=None, topk_method="group_limited_greedy", routed_scaling_factor=2.0)
    ),
    "deepseek_v2_lora": lambda: DeepseekV2Config(**_deepseek(q_lora_rank=24, topk_method="greedy")),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_deepseek(q_lora_rank=24, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8})
    ),
    "deepseek_v3_halves": lambda: DeepseekV3Config(**_deepseek(q_lora_rank=None, rope_interleave=False)),
    "deepseek_v32": lambda: DeepseekV32Config(
        **_sparse(), rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
    ),
    "mistral_window": lambda: MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma3_text": lambda: Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma2": lambda: Gemma2Config(
        **{**COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
    ),
    "gemma4_text": lambda: Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 6, "tie_word_embeddings": True},
        **_GEMMA4,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        layer_types=["sliding_attention", "full_attention", *_SLIDING],
    ),
    "phi3_window": lambda: Phi3Config(**_without("head_dim"), sliding_window=WINDOW),
    "gpt_oss": lambda: GptOssConfig(
        **{**COMMON, "num_hidden_layers": 4, "intermediate_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_delta_net(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[1, 2],
        )
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**_delta_net()),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **_delta_net(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "falcon_h1": lambda: FalconH1Config(
        **_without("head_dim"),
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_chunk_size=8,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        lm_head_multiplier=0.5,
        embedding_multiplier=1.5,
        mlp_multipliers=[0.8, 0.7],
        key_multiplier=0.9,
        attention_out_multiplier=0.8,
        attention_in_multiplier=1.2,
        ssm_multipliers=[0.9, 0.8, 1.1, 1.2, 0.7],
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.6,
    ),
    "lfm2": lambda: Lfm2Config(
        **{**_without("head_dim"), "num_hidden_layers": 4, "tie_word_embeddings": True},
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "lfm3": lambda: Lfm3Config(
        **{**COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        conv_bias=True,
        sliding_window=WINDOW,
        layer_types=["conv", "full_attention", "conv", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 100000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3_longrope": lambda: Phi3Config(
        **_without("head_dim"),
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 3.0, 4.0],
            "long_factor": [1.0, 2.0, 4.0, 6.0, 10.0, 20.0, 30.0, 40.0],
        },
    ),
    "kimi_linear": lambda: KimiLinearConfig(
        **_without("head_dim", "num_hidden_layers", "num_key_value_heads"),
        **_LATENTS_AND_STATES,
        linear_head_dim=16,
        linear_num_heads=4,
    ),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **_without("num_hidden_layers", "num_key_value_heads"), **_LATENTS_AND_STATES
    ),
    "glm5_next_text": lambda: Glm5NextTextConfig(
        **{**_without("head_dim"), "num_hidden_layers": 5, "num_key_value_heads": 4, "pad_token_id": 0},
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        v_head_dim=12,
        n_routed_experts=8,
        num_local_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        swiglu_limit=1.0,
        layer_types=["linear_attention", *["indexed_attention"] * 3, "linear_attention"],
        mlp_layer_types=["dense", "sparse", "dense", "sparse", "sparse"],
        indexer_types=["full", "full", "shared", "full", "full"],
        linear_head_dim=16,
        linear_num_heads=4,
        hc_mult=4,
        hc_sinkhorn_iters=3,
        index_topk=24,
        index_n_heads=16,
        index_head_dim=16,
        index_kpool=8,
    ),
    "minimax_m3_vl_text": lambda: MiniMaxM3VLTextConfig(
        **{**COMMON, "num_hidden_layers": 4, "intermediate_size": 32},
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=2.0,
        rope_parameters=_HALF_ROTARY,
        layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=16,
        index_topk_blocks=2,
    ),
    "deepseek_v4": lambda: DeepseekV4Config(
        **{**COMMON, "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 32},
        moe_intermediate_size=32,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        partial_rotary_factor=0.25,
        sliding_window=WINDOW,
        layer_types=[
            *("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"),
            *("heavily_compressed_attention", "compressed_sparse_attention"),
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", *["moe"] * 4],
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=6,
        hc_sinkhorn_iters=3,
        rope_parameters=dict(_YARN),  # the config writes to it
    ),
    "llama4_text": lambda: Llama4TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=CHUNK,
        floor_scale=16,
        attn_scale=0.5,
    ),
}
"""Families with latents, windows or states. Tests that go through FAMILIES are about full attention alone."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXTURE = {**_EXPERTS, "num_shared_experts": 1}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_group", "topk_group", "first_k_dense_replace"),
)
_GRANITE = {
    "embedding_multiplier": 1.5,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
}
_WINDOWED: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": _SLIDING,
}
_GRANITE_SWA = {
    **{key: value for key, value in _WINDOWED.items() if key != "head_dim"},
    **_GRANITE,
    "layer_rope_theta": [10000.0, 0, 10000.0, 500.0],  # 0: positions are not told
}


def _gemma4(**changed: Any) -> PretrainedConfig:
    return Gemma4TextConfig(**{**MIXED["gemma4_text"]().to_dict(), **changed})


GEMMA4_SIZES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma4_dense": lambda: _gemma4(enable_moe_block=False, hidden_size_per_layer_input=32),
    "gemma4_mixture": lambda: _gemma4(num_kv_shared_layers=0, hidden_size_per_layer_input=0),
}
"""Gemma 4 as its sizes are, which fused decoders take. The family's tiny model has more than any of them."""


SIMILAR: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma": lambda: GemmaConfig(**{**COMMON, "tie_word_embeddings": True}),
    "gemma4_unified_text": lambda: Gemma4UnifiedTextConfig(
        **{**COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        **_GEMMA4,
        layer_types=_SLIDING,
    ),
    "smollm3": lambda: SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1]),
    "ernie4_5": lambda: Ernie4_5Config(**COMMON, use_bias=True),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
        **_without("head_dim"),
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "granite": lambda: GraniteConfig(**_without("head_dim"), **_GRANITE),
    "glm4": lambda: Glm4Config(**COMMON, attention_bias=True, rope_parameters=_HALF_ROTARY),
    "glm4_moe": lambda: Glm4MoeConfig(**_glm_moe(), attention_bias=True, rope_parameters=_HALF_ROTARY),
    "minimax_m2": lambda: MiniMaxM2Config(
        **{**COMMON, "intermediate_size": 48},
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_HALF_ROTARY,
    ),
    "ministral3": lambda: Ministral3Config(
        **COMMON,
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 2048,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "olmo2": lambda: Olmo2Config(**_without("head_dim")),
    "olmo3": lambda: Olmo3Config(
        **{**_without("head_dim"), "num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **{key: value for key, value in _delta_net().items() if key not in ("head_dim", "rope_parameters")}
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **_without("num_hidden_layers"),
        layer_types=["linear_attention", "moe", "full_attention", "mlp", *_LINEAR[:2]],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=12,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_latent_size=48,
        routed_scaling_factor=2.5,
        time_step_min=1e-30,  # transformers' bound in prompts, which this engine does not apply
    ),
    "exaone4": lambda: Exaone4Config(
        **{**COMMON, "num_hidden_layers": 4}, sliding_window=WINDOW, layer_types=_SLIDING
    ),
    "cohere2": lambda: Cohere2Config(
        **{**_without("head_dim"), "num_hidden_layers": 4, "tie_word_embeddings": True},
        logit_scale=0.5,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(
        **_deepseek_of_kinds(),
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(**_sparse(), indexer_types=["full", "shared", "full", "shared"]),
    "bamba": lambda: BambaConfig(
        **{**_without("head_dim"), "num_hidden_layers": 4},
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_chunk_size=8,
        mamba_proj_bias=True,
        rope_parameters=_HALF_ROTARY,
    ),
    "gemma3n_text": lambda: Gemma3nTextConfig(
        **{**COMMON, "num_hidden_layers": 6, "tie_word_embeddings": True},
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE - 20,
        laurel_rank=8,
        altup_num_inputs=3,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.5],
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", *_SLIDING],
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **{**_without("head_dim"), "num_hidden_layers": 4, "intermediate_size": 32},
        layer_types=_LINEAR,
        shared_intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_chunk_size=8,
        mamba_proj_bias=True,
        **_GRANITE,
    ),
    "afmoe": lambda: AfmoeConfig(
        **{**COMMON, "num_hidden_layers": 4},
        **_MIXTURE,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        num_dense_layers=1,
        route_scale=1.5,
        mup_enabled=True,
    ),
    "dots1": lambda: Dots1Config(**_routed(), sliding_window=None),
    "exaone_moe": lambda: ExaoneMoeConfig(
        **{**COMMON, "num_hidden_layers": 4},
        **_MIXTURE,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
    ),
    "hy_v3": lambda: HYV3Config(**COMMON, **_MIXTURE),
    "mistral_large4_text": lambda: MistralLarge4TextConfig(
        **{**_without("head_dim"), "num_hidden_layers": 5, "num_key_value_heads": 4},
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        index_topk=24,
        index_n_heads=16,
        index_head_dim=16,
        no_rope_layers=[1, 1, 0, 1, 1],
        indexer_types=["full", "shared", "full", "full", "shared"],
        kv_source_layers=[0, 1, 2, 1, 1],
        final_logit_softcapping=6.0,
        rope_parameters={**_YARN, "attention_factor": 1.0},
    ),
    "mistral4": lambda: Mistral4Config(
        **_deepseek(q_lora_rank=24),
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 2048,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "solar_open": lambda: SolarOpenConfig(**_routed()),
    "apertus": lambda: ApertusConfig(**_without("head_dim"), rope_parameters=_LLAMA3),
    "arcee": lambda: ArceeConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "axk1": lambda: AXK1Config(**_deepseek(q_lora_rank=24)),
    "flex_olmo": lambda: FlexOlmoConfig(**_without("head_dim"), num_experts=4, num_experts_per_tok=2),
    "helium": lambda: HeliumConfig(**COMMON),
    "internlm3": lambda: InternLM3Config(**COMMON, attention_bias=True, mlp_bias=True),
    "iquestcoder": lambda: IQuestCoderConfig(**COMMON),
    "hy_v4": lambda: HYV4Config(
        **{key: value for key, value in _sparse().items() if key not in ("n_group", "topk_group")},
        rope_parameters=_YARN,
        indexer_types=["full", "shared", "full", "shared"],
        swiglu_limit=0.3,
        hc_magnitude=1.5,
    ),
    "minicpm3": lambda: MiniCPM3Config(
        **{**_without("head_dim"), "num_key_value_heads": 4},
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        scale_emb=3,
        dim_model_base=32,
    ),
    "vaultgemma": lambda: VaultGemmaConfig(
        **{**COMMON, "num_hidden_layers": 4},
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
    ),
    "axk2": lambda: AXK2Config(**_sparse(gated_norm_rank=8), rope_parameters=_YARN),
    "cwm": lambda: CwmConfig(**{**_WINDOWED, "bos_token_id": 257}, rope_parameters=_LLAMA3),
    "granitemoe": lambda: GraniteMoeConfig(**_without("head_dim"), **_GRANITE, **_LOCAL_EXPERTS),
    "granitemoeshared": lambda: GraniteMoeSharedConfig(
        **_without("head_dim"), **_GRANITE, **_LOCAL_EXPERTS, shared_intermediate_size=48
    ),
    "granite_swa": lambda: GraniteSWAConfig(**_GRANITE_SWA),
    "granitemoe_swa": lambda: GraniteMoeSWAConfig(**_GRANITE_SWA, **_LOCAL_EXPERTS),
    "hyperclovax": lambda: HyperCLOVAXConfig(**COMMON, **_GRANITE),
    "jais2": lambda: Jais2Config(**COMMON),
    "kolibri1": lambda: Kolibri1Config(
        **{key: value for key, value in _WINDOWED.items() if key != "intermediate_size"},
        **_EXPERTS,
        shared_expert_intermediate_size=32,
    ),
    "laguna": lambda: LagunaConfig(
        **_WINDOWED,
        **_EXPERTS,
        shared_expert_intermediate_size=32,
        num_attention_heads_per_layer=[4, 2, 4, 2],
        moe_routed_scaling_factor=1.5,
    ),
    "step3p5": lambda: Step3p7TextConfig(
        **{**_WINDOWED, "pad_token_id": 0},
        num_sliding_attention_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        share_expert_dim=48,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        moe_router_scaling_factor=1.5,
        swiglu_limits=[None, None, 0.5, None],
        swiglu_limits_shared=[None, None, None, 0.5],
    ),
    "mellum": lambda: MellumConfig(
        **_WINDOWED, **_EXPERTS, mlp_layer_types=["dense", "sparse", "sparse", "sparse"]
    ),
    "olmoe": lambda: OlmoeConfig(**_without("head_dim"), num_experts=4, num_experts_per_tok=2, clip_qkv=1.0),
    "starcoder2": lambda: Starcoder2Config(**_without("head_dim"), sliding_window=WINDOW),
    "youtu": lambda: YoutuConfig(
        **{key: value for key, value in _deepseek(q_lora_rank=24).items() if key not in _DEEPSEEK_EXPERTS}
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **{**_without("head_dim"), "num_hidden_layers": 4, "tie_word_embeddings": True},
        conv_bias=True,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "cohere": lambda: CohereConfig(
        **{**_without("head_dim"), "tie_word_embeddings": True}, logit_scale=0.5, use_qk_norm=True
    ),
    "glm": lambda: GlmConfig(**COMMON, attention_bias=True, rope_parameters=_HALF_ROTARY),
    "ministral": lambda: MinistralConfig(**_WINDOWED),
    "nanochat": lambda: NanoChatConfig(**_without("head_dim"), final_logit_softcapping=6.0),
    "nemotron": lambda: NemotronConfig(**COMMON, rope_parameters=_HALF_ROTARY),
    "olmo": lambda: OlmoConfig(**_without("head_dim"), clip_qkv=1.0),
    "stablelm": lambda: StableLmConfig(
        **_without("head_dim"),
        use_qkv_bias=True,
        qk_layernorm=True,
        use_parallel_residual=True,
        rope_parameters=_HALF_ROTARY,
    ),
    "hunyuan_v1_dense": lambda: HunYuanDenseV1Config(
        **COMMON,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0},
    ),
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**COMMON, num_experts=4, moe_topk=2),
    "cohere2_moe": lambda: Cohere2MoeConfig(
        **{**_WINDOWED, "tie_word_embeddings": True},
        logit_scale=0.5,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        prefix_dense_intermediate_size=64,
    ),
    "mimo_v2_flash": lambda: MiMoV2FlashConfig(
        **{**_WINDOWED, "head_dim": 32},
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        v_head_dim=16,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    ),
}
"""Families whose memory and attention are another family's, and that differ in their layers alone."""


def _glm_moe() -> dict[str, Any]:
    """The same with norms of heads."""
    return {**_routed(), "use_qk_norm": True}


def _routed() -> dict[str, Any]:
    """Two dense layers, if there can be, then one with experts in two groups."""
    return {
        **COMMON,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 1.5,
    }
