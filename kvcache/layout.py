"""KVGroupSpec: the shape of one KV group, from which the bytes of its pages follow (DESIGN section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from wire.errors import ConfigError
from wire.records import GroupLayout


@dataclass(frozen=True)
class KVGroupSpec:
    """Layers whose KV behaves alike and shares one page table.

    `layer_ids` are the model's layer numbers; a page holds them in this order. `tile_order` names the order
    inside a `[page_size, head_dim]` tile: "plain" is token-major; an attention backend may define another.
    """

    layer_ids: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    name: str = "full"
    kind: str = "full"
    v_head_dim: int | None = None
    tile_order: str = "plain"

    def __post_init__(self) -> None:
        """Refuse heads whose K and V differ in width: one page holds K and V tiles of one shape."""
        if self.v_head_dim not in (None, self.head_dim):
            raise ConfigError(
                "model",
                f"values are {self.v_head_dim} wide and keys {self.head_dim}",
                "serve a model whose key and value heads are equally wide",
            )

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """`[layer, 2 (K, V), head, page_size, head_dim]`."""
        return (len(self.layer_ids), 2, self.kv_heads, page_size, self.head_dim)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: all layers, K and V, contiguous."""
        return prod(self.page_shape(page_size)) * self.dtype.itemsize

    def to_layout(self, page_size: int) -> GroupLayout:
        """The same for a worker record and a handshake."""
        return GroupLayout(
            name=self.name,
            kind=self.kind,
            shape=self.page_shape(page_size),
            dtype=str(self.dtype).removeprefix("torch."),
            tile_order=self.tile_order,
            page_size=page_size,
            page_bytes=self.page_bytes(page_size),
        )


def pages_in(nbytes: int, specs: tuple[KVGroupSpec, ...], page_size: int) -> int:
    """How many pages of every group fit into `nbytes`, the scratch page of each group deducted."""
    return max(0, nbytes // sum(spec.page_bytes(page_size) for spec in specs) - 1)
