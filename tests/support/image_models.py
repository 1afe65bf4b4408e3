"""Tiny models that take images, too, whose greedy answers to a text are clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3nAudioConfig,
    Gemma3nConfig,
    Gemma3nVisionConfig,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    Glm5NextConfig,
    Kimi_K25Config,
    Kimi_K25VisionConfig,
    Llama4Config,
    Llama4VisionConfig,
    MiniMaxM3VLConfig,
    Mistral3Config,
    MistralLarge4Config,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    SiglipVisionConfig,
    Step3p7Config,
)

from tests.support.reference import MIN_MARGIN, greedy
from tests.support.tiny_configs import FAMILIES, MIXED, SIMILAR, VOCAB_SIZE
from tests.support.tiny_models import randomise, write_tokenizer

PROMPT = [65, 10, 7, 200, 31, 99, 143, 12, 5, 250, 88, 61] * 3
TOKENS = 24


def _siglip() -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )


def _pixtral() -> PixtralVisionConfig:
    return PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )


def _qwen(text: str) -> dict[str, Any]:
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    return {
        "text_config": MIXED[text]().to_dict(),
        "vision_config": sizes,
        "image_token_id": 300,
        "video_token_id": 301,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
    }


def _mistral3(text: PretrainedConfig) -> PretrainedConfig:
    return Mistral3Config(
        text_config=text, vision_config=_pixtral(), image_token_index=300, tie_word_embeddings=False
    )


_GEMMA4_TOKENS = {
    name: 300 + number
    for number, name in enumerate(
        (
            *("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id"),
            *("boa_token_id", "eoa_token_index", "audio_token_id"),
        )
    )
}
WHOLES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=MIXED["gemma3_text"](),
        vision_config=_siglip(),
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
    "gemma3n": lambda: Gemma3nConfig(
        text_config=SIMILAR["gemma3n_text"]().to_dict(),
        vision_config=Gemma3nVisionConfig(hidden_size=32, vocab_size=4, vocab_offset=VOCAB_SIZE),
        audio_config=Gemma3nAudioConfig(
            hidden_size=32,
            vocab_size=4,
            vocab_offset=VOCAB_SIZE + 4,
            conf_num_hidden_layers=1,
            conf_num_attention_heads=2,
        ),
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=MIXED["gemma4_text"]().to_dict() | {"pad_token_id": 0},
        vision_config=Gemma4VisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
        ),
        **_GEMMA4_TOKENS,
    ),
    "gemma4_unified": lambda: Gemma4UnifiedConfig(
        text_config=SIMILAR["gemma4_unified_text"]().to_dict() | {"pad_token_id": 0},
        vision_config=Gemma4UnifiedVisionConfig(mm_embed_dim=64, mm_posemb_size=16, output_proj_dims=64),
        **_GEMMA4_TOKENS,
    ),
    "glm5_next": lambda: Glm5NextConfig(
        text_config=MIXED["glm5_next_text"]().to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "image_size": 28,
            "out_hidden_size": 64,
            "projection_intermediate_size": 32,
        },
        image_token_id=300,
        video_token_id=301,
    ),
    "kimi_k25": lambda: Kimi_K25Config(
        text_config=MIXED["deepseek_v3"]().to_dict(),
        vision_config=Kimi_K25VisionConfig(
            num_attention_heads=2, num_hidden_layers=1, hidden_size=32, intermediate_size=32
        ),
        projection_hidden_size=32,
        tie_word_embeddings=False,
        image_token_id=300,
        video_token_id=301,
        vision_start_token_id=302,
        vision_end_token_id=303,
    ),
    "llama4": lambda: Llama4Config(
        text_config=MIXED["llama4_text"](),
        vision_config=Llama4VisionConfig(
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            vision_output_dim=32,
            image_size=28,
            projector_input_dim=32,
            projector_output_dim=32,
        ),
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
    "minimax_m3_vl": lambda: MiniMaxM3VLConfig(
        text_config=MIXED["minimax_m3_vl_text"]().to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        },
        projector_hidden_size=32,
        image_token_index=300,
        video_token_index=301,
    ),
    "mistral3": lambda: _mistral3(FAMILIES["mistral"]()),
    "ministral3": lambda: _mistral3(SIMILAR["ministral3"]()),
    "mistral_large4": lambda: MistralLarge4Config(
        text_config=SIMILAR["mistral_large4_text"]().to_dict(),
        vision_config=_pixtral(),
        image_token_index=300,
    ),
    "mistral4": lambda: _mistral3(SIMILAR["mistral4"]()),
    "step3p7": lambda: Step3p7Config(
        text_config=SIMILAR["step3p5"]().to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_id=300,
    ),
    "qwen3_5": lambda: Qwen3_5Config(**_qwen("qwen3_5_text")),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(**_qwen("qwen3_5_moe_text")),
}


@contextmanager
def _without_timm() -> Iterator[None]:
    """Gemma 3n's images would go through a model of timm, which is not installed. Text does not."""
    from_config = AutoModel.from_config

    def build(config: Any, **options: Any) -> Any:
        return nn.Identity() if isinstance(config, Gemma3nVisionConfig) else from_config(config, **options)

    with patch.object(AutoModel, "from_config", build):
        yield


@cache
def whole_model(family: str) -> Any:
    config = WHOLES[family]()
    with _without_timm():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for seed in range(20):
        randomise(model, seed)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if generated(model)[1] >= MIN_MARGIN:
            return model
    raise AssertionError("no seed gives clear tokens")


def generated(model: Any) -> tuple[list[int], float]:
    """(TOKENS greedy tokens after PROMPT, smallest margin of a step; 0 if few tokens differ)"""
    [(tokens, margin)] = greedy(model.eval(), [PROMPT], TOKENS)
    return list(tokens), margin if len(set(tokens)) > 4 else 0.0


def written(family: str, directory: Path) -> Path:
    model = whole_model(family)
    model.save_pretrained(directory)
    if family == "kimi_k25":  # transformers gives the text part's layers the name of the images' blocks
        names = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
        weights = {
            new + name.removeprefix(old): weight
            for name, weight in model.state_dict().items()
            for old, new in names.items()
            if name.startswith(old)
        }
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
    write_tokenizer(directory)
    return directory
