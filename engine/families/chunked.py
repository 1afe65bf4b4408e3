"""Families in which some layers see the tokens of a chunk alone. These layers form the window group.

A query sees no more than a chunk's length of tokens, so that the pages of a window of that length hold all
that it may see (engine/attention_chunks.py).
"""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.windowed import full_and_window, layers_of
from engine.llama4 import prepare
from kvcache.layout import KVGroupSpec

_LAYER_TYPES = frozenset({"full_attention", "chunked_attention"})


def _groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
    full, chunked = (layers_of(config, {kind}) for kind in ("full_attention", "chunked_attention"))
    return full_and_window(config, dtypes, full, chunked, config.attention_chunk_size)


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
