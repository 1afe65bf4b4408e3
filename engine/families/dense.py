"""Families with full attention in every layer."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
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


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _groups, check=_no_window),
}
