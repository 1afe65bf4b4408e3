"""Families in which some layers see the tokens of a chunk alone. These layers form the window group.

A query sees no more than a chunk's length of tokens, so that the pages of a window of that length hold all
that it may see (engine/attention_chunks.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.dense import full_group
from engine.llama4 import prepare
from kvcache.layout import KVGroupSpec

_LAYER_TYPES = frozenset({"full_attention", "chunked_attention"})


def _groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
    """The full group comes first even if it has no layers, because its page ids name the token pages."""
    kinds = config.layer_types
    full = full_group(config, dtypes, tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"))
    chunked = tuple(i for i, kind in enumerate(kinds) if kind == "chunked_attention")
    if not chunked:
        return (full,)
    return full, replace(full, layer_ids=chunked, name="window", window=config.attention_chunk_size)


def _check(config: Any) -> None:
    chunk = config.attention_chunk_size
    if "chunked_attention" in config.layer_types and (not isinstance(chunk, int) or chunk < 2):
        raise UnsupportedModel(
            f"attention_chunk_size is {chunk} in config.json, but there are chunked layers",
            "use a checkpoint whose attention_chunk_size is at least 2",
        )


FAMILIES: dict[str, Family] = {
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _groups,
        _LAYER_TYPES,
        allows=frozenset({"attention_chunk_size"}),
        check=_check,
        prepare=prepare,
    ),
}
