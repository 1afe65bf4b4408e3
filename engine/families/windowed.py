"""Families in which some or all layers may see only a window of tokens. These layers form their own group."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.dense import full_group
from engine.families.heads import apply_logit_scale, cap_logits, divide_logits
from engine.step import group_experts
from kvcache.layout import KVGroupSpec

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
Sliding = Callable[[Any], tuple[int, ...]]


def layers_of(config: Any, kinds: Collection[str]) -> tuple[int, ...]:
    """The layers that layer_types marks as one of these kinds."""
    return tuple(i for i, kind in enumerate(config.layer_types) if kind in kinds)


def _named(config: Any) -> tuple[int, ...]:
    """The layers that layer_types marks as sliding."""
    return layers_of(config, {"sliding_attention"})


def _every(config: Any) -> tuple[int, ...]:
    """All layers if the config has a window, else none. These families do not read layer_types."""
    return () if config.sliding_window is None else tuple(range(config.num_hidden_layers))


def full_and_window(
    config: Any, dtypes: Dtypes, full_layers: tuple[int, ...], windowed: tuple[int, ...], window: int | None
) -> tuple[KVGroupSpec, ...]:
    """The full group comes first even if it has no layers, because its page ids name the token pages."""
    full = full_group(config, dtypes, full_layers)
    if not windowed:
        return (full,)
    return full, replace(full, layer_ids=windowed, name="window", window=window)


def _groups_of(sliding: Sliding) -> Callable[[Any, Dtypes], tuple[KVGroupSpec, ...]]:
    def groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
        windowed = sliding(config)
        rest = tuple(i for i in range(config.num_hidden_layers) if i not in windowed)
        return full_and_window(config, dtypes, rest, windowed, config.sliding_window)

    return groups


def check_named(config: Any) -> None:
    """If there are sliding layers, sliding_window must be valid."""
    if _named(config):
        _check_window(config)


def _check_every(config: Any) -> None:
    """layer_types, if a config has it, must match what the model computes in every layer."""
    window = config.sliding_window
    if window is not None:
        _check_window(config)
    computed = "full_attention" if window is None else "sliding_attention"
    if set(getattr(config, "layer_types", None) or ()) - {computed}:
        raise UnsupportedModel(
            f"sliding_window is {window} in config.json: every layer is {computed}, but layer_types differs",
            "use a checkpoint without layer_types",
        )


def _check_window(config: Any) -> None:
    window = config.sliding_window
    if not isinstance(window, int) or window < 2:
        # With 1, generate() of transformers does not agree with its own forward: its cache keeps every token.
        raise UnsupportedModel(
            f"sliding_window is {window} in config.json, but there are sliding layers",
            "use a checkpoint whose sliding_window is at least 2",
        )


def by_layer_type(architecture: str) -> Family:
    """A family in which layer_types names the layers that have sliding_window. It may name none."""
    return Family(architecture, _groups_of(_named), _LAYER_TYPES, check=check_named)


def _all_alike(architecture: str) -> Family:
    """A family in which sliding_window, unless null, applies to every layer."""
    return Family(architecture, _groups_of(_every), _LAYER_TYPES, check=_check_every)


def _capped(architecture: str) -> Family:
    """The same with soft-capped scores and logits."""
    caps = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
    return replace(by_layer_type(architecture), allows=caps, prepare=cap_logits)


def _mimo_groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
    """Layers with a window have twice as many heads. Values are narrower than keys (engine/row_widths.py)."""
    width = max(config.head_dim, config.v_head_dim)
    full, *windowed = _groups_of(_named)(config, dtypes)
    twice = 2 * config.num_key_value_heads
    return replace(full, head_dim=width), *(replace(one, head_dim=width, kv_heads=twice) for one in windowed)


FAMILIES: dict[str, Family] = {
    "mixtral": _all_alike("MixtralForCausalLM"),
    "phi3": _all_alike("Phi3ForCausalLM"),
    "qwen2_moe": by_layer_type("Qwen2MoeForCausalLM"),
    "gemma2": _capped("Gemma2ForCausalLM"),
    "vaultgemma": _capped("VaultGemmaForCausalLM"),
    "ministral": by_layer_type("MinistralForCausalLM"),
    "ministral3": _all_alike("Ministral3ForCausalLM"),
    "mistral": _all_alike("MistralForCausalLM"),
    "qwen2": by_layer_type("Qwen2ForCausalLM"),
    "qwen3": by_layer_type("Qwen3ForCausalLM"),
    "qwen3_moe": _all_alike("Qwen3MoeForCausalLM"),
    "gemma3_text": by_layer_type("Gemma3ForCausalLM"),
    "gpt_oss": by_layer_type("GptOssForCausalLM"),
    "afmoe": by_layer_type("AfmoeForCausalLM"),
    "cwm": by_layer_type("CwmForCausalLM"),
    "cohere2": replace(by_layer_type("Cohere2ForCausalLM"), prepare=apply_logit_scale),
    "cohere2_moe": replace(by_layer_type("Cohere2MoeForCausalLM"), prepare=apply_logit_scale),
    "dots1": by_layer_type("Dots1ForCausalLM"),
    "exaone4": by_layer_type("Exaone4ForCausalLM"),
    "exaone_moe": by_layer_type("ExaoneMoeForCausalLM"),
    "granite_swa": replace(by_layer_type("GraniteSWAForCausalLM"), prepare=divide_logits),
    "granitemoe_swa": replace(by_layer_type("GraniteMoeSWAForCausalLM"), prepare=divide_logits),
    "kolibri1": by_layer_type("Kolibri1ForCausalLM"),
    "laguna": by_layer_type("LagunaForCausalLM"),
    "mellum": by_layer_type("MellumForCausalLM"),
    "mimo_v2_flash": replace(by_layer_type("MiMoV2FlashForCausalLM"), groups=_mimo_groups),
    "olmo3": by_layer_type("Olmo3ForCausalLM"),
    "smollm3": by_layer_type("SmolLM3ForCausalLM"),
    "starcoder2": _all_alike("Starcoder2ForCausalLM"),
    "step3p5": replace(by_layer_type("Step3p7ForCausalLM"), prepare=group_experts),
}
