"""What attention backends need to know of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.block_choice import BlockChoice
from engine.errors import UnsupportedModel
from engine.paged_layers import Compression
from engine.token_choice import TokenChoice
from kvcache.layout import GroupSpec


@dataclass(frozen=True)
class AttentionLayer:
    """The properties of one attention layer that its backend needs, read from the layer's module."""

    layer: int
    query_heads: int
    scale: float  # factor on q.k
    window: int | None  # keys that a query sees, itself included; None: all
    sinks: bool = False  # whether a learned logit per head joins each softmax
    softcap: float | None = None  # c: a score s becomes c tanh(s / c)
    choice: TokenChoice | None = None  # of its context, which the layer's indexer chooses; None: all
    shares: int | None = None  # the layer whose keys and values it reads; None: its own
    compression: Compression | None = None  # how its entries are made; None: it has none
    blocks: BlockChoice | None = None  # of its context, which queries see; None: all
    in_chunks: bool = False  # a query sees those of its chunk of `window` tokens (engine/attention_chunks.py)

    @property
    def kv_layer(self) -> int:
        """The layer whose pages it reads."""
        return self.layer if self.shares is None else self.shares


def attention_layers(model: Any, shared: Mapping[int, int]) -> tuple[AttentionLayer, ...]:
    """Of every attention module of a transformers model, in layer order. The modules are read, not the
    config, because they compute. `shared`: as Family has it."""
    modules: Any = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
    return tuple(
        AttentionLayer(
            m.layer_idx,
            # Of this rank. Laguna's layers differ, and Step 3.7's, whose config has no number for all.
            m.num_heads if hasattr(m, "num_heads") else model.config.num_attention_heads,
            float(m.scaling),
            _window(m),
            getattr(m, "sinks", None) is not None,
            getattr(m, "attn_logit_softcapping", None),
            getattr(m, "choice", None),
            shared.get(m.layer_idx),
            getattr(getattr(m, "compressor", None), "compression", None),
            getattr(m, "blocks", None),
            _kind(m) == "chunked_attention",
        )
        for m in sorted(modules, key=lambda module: module.layer_idx)
    )


def _window(attention: Any) -> int | None:
    """The window of an attention module. Some read it from the config, Qwen2-MoE's in sliding layers."""
    config: Any = getattr(attention, "config", None)
    window: int | None
    match _kind(attention):
        case "full_attention":
            window = None
        case "chunked_attention":
            window = config.attention_chunk_size
        case _:
            window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return window


def _kind(attention: Any) -> str | None:
    """Its layer's entry in layer_types."""
    kinds = getattr(getattr(attention, "config", None), "layer_types", None)
    return kinds[attention.layer_idx] if kinds else None


def check_layers(groups: tuple[GroupSpec, ...], attention: tuple[AttentionLayer, ...]) -> None:
    """Raises UnsupportedModel if a model's modules do not match the groups that its family derived from the
    config."""
    windows = {layer: group.window for group in groups if group.kind != "state" for layer in group.layer_ids}
    own = {facts.layer: facts.window for facts in attention if facts.shares is None}
    if own != windows or any(own.get(facts.kv_layer, 0) != facts.window for facts in attention):
        raise UnsupportedModel(
            "its attention layers or windows differ from those in its config.json", "use another checkpoint"
        )
