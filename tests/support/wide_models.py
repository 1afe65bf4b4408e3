"""Tiny models with the head dimensions for which FlashInfer has kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_configs import FAMILIES, MIXED, SIMILAR
from tests.support.tiny_models import write_tiny

DENSE = (
    *("cwm", "gemma2", "gemma3_text", "glm", "glm4", "granite", "hyperclovax", "llama", "llama_yarn"),
    *("mistral", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
)
MIXTURES = (
    *("dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "granitemoe", "hy_v3", "kolibri1"),
    *("mellum", "mixtral", "qwen2_moe", "qwen3_moe", "solar_open"),
)
"""Families whose whole decoder is replaced on CUDA; of mixtures all but routers and experts."""

WIDE = (
    *DENSE,
    "qwen3_moe",
    "mistral_window",
    "gemma4_text",
    "gpt_oss",
    "llama4_text",
    "mimo_v2_flash",
    "deepseek_v3",
    "deepseek_v32",
    "mistral_large4_text",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "glm5_next_text",
    "kimi_linear",
    "qwen3_next",
)


def make_wide(family: str, directory: Path, seed: int) -> Path:
    """The family's tiny model with heads of 64, of Gemma 4's full layers 512, of MiMo's keys 96, which are
    filled up to 128, of DeepSeek-V4 512, or latents of 512 + 64. Indexers have 128."""
    config: Any = {**FAMILIES, **MIXED, **SIMILAR}[family]()
    if hasattr(config, "kv_lora_rank"):
        config.kv_lora_rank = 512
        config.qk_rope_head_dim = 64 if config.qk_rope_head_dim else 0
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        config.head_dim = config.qk_rope_head_dim
        if hasattr(config, "index_head_dim"):
            config.index_head_dim = 128
    elif family == "gemma4_text":
        layers = {
            layer: {**keys, "head_dim": 512} for layer, keys in config.to_dict()["per_layer_config"].items()
        }
        config = type(config)(**{**config.to_dict(), "head_dim": 64, "per_layer_config": layers})
    elif family == "deepseek_v4":
        config.head_dim, config.index_head_dim = 512, 128
        for rope in config.rope_parameters.values():
            rope["partial_rotary_factor"] = 64 / 512
    elif family == "minimax_m3_vl_text":
        config.head_dim = config.index_head_dim = 64
    elif family == "mimo_v2_flash":
        config.head_dim, config.v_head_dim = 96, 64
    else:
        config.head_dim = 64
    path = directory / f"{family}-wide"
    write_tiny(config, path, seed)
    return path
