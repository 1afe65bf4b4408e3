"""The text part of a checkpoint that takes images, too: Gemma 3, 3n and 4, GLM-5.3, Llama 4, MiniMax-M3,
Mistral Small 3 and Large 4, Qwen 3.5, Kimi K2.5, Step 3.7.

Text alone goes through the same layers as in a model without images, so that only these are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from engine.errors import UnsupportedModel

Weight = TypeVar("Weight")

_ARCHITECTURES = {
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "gemma3n": ("Gemma3nForConditionalGeneration",),
    "gemma4": ("Gemma4ForConditionalGeneration",),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration",),
    "glm5_next": ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    "llama4": ("Llama4ForConditionalGeneration",),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration",),
    "mistral3": ("Mistral3ForConditionalGeneration",),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration",),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration",),
    "step3p7": ("Step3p7ForConditionalGeneration",),
}
"""model_type -> the names, there and in published files, of the class that is tested token by token against
its own generate() of text. Others are not taken by their form alone: PaliGemma's prompts, for one, see what
follows."""

_OF_THE_WHOLE = ("dtype", "eos_token_id", "quantization_config", "compression_config")
"""Settings that config.json has beside the text part's."""

_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    # GLM-5.3 without images
    **{name: name for name in ("model.embed_tokens.", "model.layers.", "model.norm.")},
    # Mistral Large 4
    **{"tok_embeddings.": "model.embed_tokens.", "output.": "lm_head."},
    **{"layers.": "model.layers.", "norm.": "model.norm.", "lerope.": "model.rotary_emb."},
}
"""How names of the text part's weights begin, in published files and in those of transformers -> in a model
of text alone."""


def text_part(config: Any) -> Any:
    """The text part's transformers config; `config` itself if the model takes text alone.

    Raises UnsupportedModel for another class over such a config.
    """
    expected = _ARCHITECTURES.get(getattr(config, "model_type", ""))
    if expected is None:
        return config
    if config.architectures and not set(expected) & set(config.architectures):
        raise UnsupportedModel(
            f"architectures is {config.architectures!r} in config.json, not {expected[0]}",
            f"use a checkpoint of {expected[0]}",
        )
    part = copy.deepcopy(config.get_text_config())
    part.architectures = None
    part.model_type = type(part).model_type  # of a config without parts it is the whole's
    for key in _OF_THE_WHOLE:
        if (value := getattr(config, key, None)) is not None:
            setattr(part, key, value)
    return part


def text_weights(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Those of the text part, by the names that they have in a model of text alone."""
    return {
        new + name.removeprefix(old): weight
        for name, weight in weights.items()
        for old, new in _NAMES.items()
        if name.startswith(old)
    }
