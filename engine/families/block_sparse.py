"""Families with block-sparse attention (engine/block_sparse.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.block_sparse import BlockSparseAttention
from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.dense import head_dim
from kvcache.indexed_layout import IndexedKVGroupSpec

_SPARSE = "minimax_m3_sparse"


def _groups(config: Any, dtypes: Dtypes) -> tuple[IndexedKVGroupSpec, ...]:
    """A page has one shape for all layers: the few without an indexer have room for its keys, too."""
    layers = tuple(range(config.num_hidden_layers))
    heads, dim = config.num_key_value_heads, head_dim(config)
    return (IndexedKVGroupSpec(layers, heads, dim, dtypes.kv, index_dim=config.index_head_dim),)


def _check(config: Any) -> None:
    """Raises UnsupportedModel for a choice of blocks that is not computed."""
    if config.num_attention_heads % config.index_n_heads:
        raise UnsupportedModel(
            f"{config.index_n_heads} heads of an indexer choose for {config.num_attention_heads} query heads "
            "by config.json",
            "use a checkpoint whose numbers divide each other",
        )
    if not 0 <= config.index_local_blocks <= config.index_topk_blocks:
        raise UnsupportedModel(
            f"index_local_blocks is {config.index_local_blocks} in config.json, and index_topk_blocks "
            f"{config.index_topk_blocks}",
            "use a checkpoint that chooses at least its local blocks",
        )


def _prepare(model: nn.Module) -> None:
    decoder: Any = model.model
    for layer in decoder.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn = BlockSparseAttention(layer.self_attn)


FAMILIES: dict[str, Family] = {
    "minimax_m3_vl_text": Family(
        "MiniMaxM3VLForCausalLM",
        _groups,
        frozenset({"full_attention", _SPARSE}),
        check=_check,
        prepare=_prepare,
    ),
}
