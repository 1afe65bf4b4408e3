"""Random shapes of every family that is served, and random ways to serve them. A seed decides everything."""

from __future__ import annotations

import random
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.support.random_shapes import SHAPES, ShapeDraw
from tests.support.random_similar_shapes import SIMILAR_SHAPES

EVERY_SHAPE = {**SHAPES, **SIMILAR_SHAPES}
"""model_type -> what draws its shape. tests hold it against the engine's table."""

_WITHOUT_HEAD_DIM = (
    *(
        "apertus",
        "axk1",
        "bamba",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "ernie4_5_moe",
    ),
    *("flex_olmo", "hy_v4", "minicpm3"),
    *("falcon_h1", "glm4_moe_lite", "glm_moe_dsa", "granite", "granite_swa", "granitemoe"),
    *(
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "lfm2",
        "lfm2_moe",
        "mistral4",
        "nanochat",
        "mistral_large4_text",
    ),
    *(
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "phi3",
        "qwen2_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
        "youtu",
    ),
)


def family_of(seed: int) -> str:
    """The families take turns."""
    return sorted(EVERY_SHAPE)[seed % len(EVERY_SHAPE)]


def random_config(seed: int) -> PretrainedConfig:
    """A small model of the seed's family."""
    family = family_of(seed)
    draw = ShapeDraw(random.Random(f"shape {seed}"))
    keys = {**draw.common(), **EVERY_SHAPE[family](draw)}
    if family in _WITHOUT_HEAD_DIM:
        del keys["head_dim"]
    if family == "falcon_h1":
        keys["hidden_size"] = draw.heads * draw.head_dim
    config: PretrainedConfig = AutoConfig.for_model(family, **keys)
    return config


def random_options(seed: int) -> dict[str, Any]:
    """How the model is served: the options of both workers."""
    rng = random.Random(f"options {seed}")
    page_size = rng.choice([1, 2, 4, 8, 16, 32])
    return {
        "engine": "transformers",
        "dtype": "float32",
        "threads": 1,
        "attention_backend": rng.choice(["auto", "torch"]),
        "page_size": page_size,
        "chunked_prefill_size": rng.choice([None, 16, 24, 32, 64]),
        "max_total_tokens": 2048,
        "max_context_tokens": 512,
        "mamba_track_interval": page_size * rng.randrange(1, 5),
        "max_running_requests": 4,
        "overlap_depth": rng.randrange(2),
        "prefix_cache": rng.choice(["radix", "radix", "none"]),
        "kv_checksums": "all",
    }


def random_prompts(seed: int) -> list[list[int]]:
    """Three prompts; the third begins like the second."""
    rng = random.Random(f"prompts {seed}")
    lengths = [rng.randrange(1, 30), rng.randrange(30, 160), rng.randrange(1, 40)]
    short, long, tail = ([rng.randrange(256) for _ in range(length)] for length in lengths)
    return [short, long, [*long[: rng.randrange(len(long))], *tail]]
