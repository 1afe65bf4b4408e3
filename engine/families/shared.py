"""Families whose last layers have no keys and values of their own: they read those of an earlier layer.

Their groups hold the pages of the other layers alone. A layer reads those of the last layer before the shared
ones that is of its type, full or sliding, as the heads of the two types may differ in number and width
(docs/decisions/0068).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes
from engine.families.heads import cap_logits
from engine.families.windowed import by_layer_type, check_named, full_and_window, layers_of
from engine.gemma3n import Gemma3nDecoder, thin_gates
from engine.kv_sharing import Gemma4Decoder, own_layers, shared_layers
from kvcache.layout import KVGroupSpec


def _groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
    """Full layers, of which there is one at least, have heads of their own number and width (Gemma 4's
    global_head_dim)."""
    own = config.layer_types[: own_layers(config)]

    def group(kind: str, name: str, window: int | None) -> KVGroupSpec:
        heads = config.per_layer_config[own.index(kind)]
        layers = tuple(layer for layer, other in enumerate(own) if other == kind)
        return KVGroupSpec(
            layers, heads.num_key_value_heads, heads.head_dim, dtypes.kv, name=name, window=window
        )

    full = group("full_attention", "full", None)
    if "sliding_attention" not in own:
        return (full,)
    return full, group("sliding_attention", "window", config.sliding_window)


def _groups_of_equal_heads(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
    """Gemma 3n's: full and sliding layers have the same heads."""
    own = range(own_layers(config))
    full, sliding = (
        tuple(layer for layer in layers_of(config, {kind}) if layer in own)
        for kind in ("full_attention", "sliding_attention")
    )
    return full_and_window(config, dtypes, full, sliding, config.sliding_window)


def _check(config: Any) -> None:
    check_named(config)
    if config.num_kv_shared_layers and not config.hidden_size_per_layer_input:
        raise UnsupportedModel(
            f"num_kv_shared_layers is {config.num_kv_shared_layers} in config.json without "
            "hidden_size_per_layer_input: transformers does not compute that",
            "use a published Gemma 4",
        )


def _prepare(model: Any) -> None:
    cap_logits(model)
    model.model = Gemma4Decoder(model.model)


def _prepare_gemma3n(model: Any) -> None:
    cap_logits(model)
    thin_gates(model.model)
    model.model = Gemma3nDecoder(model.model)


_GEMMA4 = replace(
    by_layer_type("Gemma4ForCausalLM"),
    groups=_groups,
    allows=frozenset({"num_kv_shared_layers", "final_logit_softcapping"}),
    check=_check,
    prepare=_prepare,
    shared=shared_layers,
)
FAMILIES = {
    "gemma3n_text": replace(
        _GEMMA4,
        architecture="Gemma3nForCausalLM",
        groups=_groups_of_equal_heads,
        check=check_named,
        prepare=_prepare_gemma3n,
    ),
    "gemma4_text": _GEMMA4,
    # Without embeddings of each layer, which its shared layers do not need.
    "gemma4_unified_text": replace(_GEMMA4, architecture="Gemma4UnifiedForCausalLM", check=check_named),
}
