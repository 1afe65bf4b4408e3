"""Families with full attention in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.dropped import pass_paged
from engine.families.heads import apply_logit_scale, cap_logits, divide_logits, multiply_logits
from kvcache.layout import KVGroupSpec


def head_dim(config: Any) -> int:
    """Width of a head. It is derived if the config does not give it."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def full_group(config: Any, dtypes: Dtypes, layer_ids: tuple[int, ...]) -> KVGroupSpec:
    """These layers as one full-attention group."""
    return KVGroupSpec(layer_ids, config.num_key_value_heads, head_dim(config), dtypes.kv)


def _groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
    return (full_group(config, dtypes, tuple(range(config.num_hidden_layers))),)


def _no_window(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise UnsupportedModel(
            f"sliding_window is {window} in config.json", "use a checkpoint whose sliding_window is null"
        )


def _family(architecture: str) -> Family:
    return Family(architecture, _groups, check=_no_window)


def _granite(architecture: str) -> Family:
    return replace(_family(architecture), prepare=divide_logits)


FAMILIES: dict[str, Family] = {
    "apertus": _family("ApertusForCausalLM"),
    "arcee": _family("ArceeForCausalLM"),
    "cohere": replace(_family("CohereForCausalLM"), prepare=apply_logit_scale),
    "ernie4_5": _family("Ernie4_5ForCausalLM"),
    "ernie4_5_moe": _family("Ernie4_5_MoeForCausalLM"),
    "flex_olmo": _family("FlexOlmoForCausalLM"),
    "gemma": _family("GemmaForCausalLM"),
    "glm": _family("GlmForCausalLM"),
    "glm4": _family("Glm4ForCausalLM"),
    "glm4_moe": _family("Glm4MoeForCausalLM"),
    "granite": _granite("GraniteForCausalLM"),
    "granitemoe": _granite("GraniteMoeForCausalLM"),
    "granitemoeshared": _granite("GraniteMoeSharedForCausalLM"),
    "helium": _family("HeliumForCausalLM"),
    "hunyuan_v1_dense": _family("HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": _family("HunYuanMoEV1ForCausalLM"),
    "hy_v3": _family("HYV3ForCausalLM"),
    "hyperclovax": replace(_family("HyperCLOVAXForCausalLM"), prepare=multiply_logits),
    "internlm3": replace(_family("LlamaForCausalLM"), published="InternLM3ForCausalLM"),
    "iquestcoder": replace(_family("LlamaForCausalLM"), published="IQuestCoderForCausalLM"),
    "jais2": _family("Jais2ForCausalLM"),
    "llama": _family("LlamaForCausalLM"),
    "minimax_m2": _family("MiniMaxM2ForCausalLM"),
    "nanochat": replace(
        _family("NanoChatForCausalLM"), allows=frozenset({"final_logit_softcapping"}), prepare=cap_logits
    ),
    "nemotron": replace(_family("NemotronForCausalLM"), prepare=pass_paged),
    "olmo": _family("OlmoForCausalLM"),
    "olmo2": _family("Olmo2ForCausalLM"),
    "olmoe": _family("OlmoeForCausalLM"),
    "seed_oss": _family("SeedOssForCausalLM"),
    "solar_open": _family("SolarOpenForCausalLM"),
    "stablelm": replace(_family("StableLmForCausalLM"), prepare=pass_paged),
}
