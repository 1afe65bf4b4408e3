"""Families with compressed attention (engine/compressed.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.compressed import CompressedAttention
from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from kvcache.entry_layout import EntryGroupSpec, LayerRows

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def _groups(config: Any, dtypes: Dtypes) -> tuple[EntryGroupSpec, ...]:
    """Entries, with the indexer's beside them; and rows of a window, in which a token keeps what entries are
    made of: a value and a gate for each value of an entry, and in sparse layers another two for the entry
    after."""
    dim, index_dim = config.head_dim, config.index_head_dim
    entries, rows = [], []
    for layer, kind in enumerate(config.layer_types):
        width = dim
        if kind == _SPARSE:
            entries.append(LayerRows(layer, dim + index_dim, config.compress_rates[kind]))
            width += 4 * (dim + index_dim)
        elif kind == _HEAVY:
            entries.append(LayerRows(layer, dim, config.compress_rates[kind]))
            width += 2 * dim
        rows.append(LayerRows(layer, width))
    window = EntryGroupSpec(tuple(rows), dtypes.kv, "window", config.sliding_window)
    return EntryGroupSpec(tuple(entries), dtypes.kv), window


def _check(config: Any) -> None:
    """Raises UnsupportedModel if an entry is made of more tokens than the window group keeps."""
    for kind, spans in ((_SPARSE, 2), (_HEAVY, 1)):
        tokens = spans * config.compress_rates[kind]
        if kind in config.layer_types and tokens > config.sliding_window:
            raise UnsupportedModel(
                f"an entry of {kind} is made of {tokens} tokens by config.json, "
                f"and sliding_window is {config.sliding_window}",
                "use a checkpoint whose window is as long as an entry",
            )


def _prepare(model: nn.Module) -> None:
    decoder: Any = model.model
    for layer in decoder.layers:
        layer.self_attn = CompressedAttention(layer.self_attn)


FAMILIES: dict[str, Family] = {
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        _groups,
        frozenset({"sliding_attention", _SPARSE, _HEAVY}),
        frozenset({"index_topk"}),
        _check,
        _prepare,
    ),
}
