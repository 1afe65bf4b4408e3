"""Group specs: the shape of each KV group, from which the bytes of its pages follow (docs/decisions/0014).

    GroupSpec
      TokenGroupSpec
        KVGroupSpec       keys and values per head: full attention, or a sliding window
          IndexedKVGroupSpec  and an indexer's key of each token (kvcache/indexed_layout.py)
        LatentGroupSpec   one compressed vector per token (MLA): full attention as well
      EntryGroupSpec    rows that stand for several tokens each (kvcache/entry_layout.py)
      StateGroupSpec    what linear attention, Mamba and short convolutions remember: one slot per sequence

The primary group (full, latent or entries) is a model's first. A model whose layers all have a window has a
full group without layers: its page ids name token pages all the same, and use no memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from common.errors import ConfigError
from kvcache.quant import KVFormat
from wire.records import GroupLayout

SLOT_ALIGN = 64
"""Bytes to which each tensor of a state slot is aligned: a cache line, and any vector load."""


class GroupSpec(ABC):
    """What all groups have: a `name`, the key of pools, targets and layouts; a `kind`; and `layer_ids`."""

    layer_ids: tuple[int, ...]
    name: str
    window: int | None = None  # of a window group: tokens that a query reaches back, itself included
    window_ratio: float = (
        0.8  # of a window group: its pages, as a share of the primary group's, if not chosen
    )

    @property
    @abstractmethod
    def kind(self) -> str:
        """ "full", "latent", "entries", "window" or "state"."""

    @property
    def blocks(self) -> int:
        """Blocks of a page, in each of which all heads follow one another; 1 if there are no heads."""
        return 1

    def tail_bytes(self, page_size: int) -> int:
        """Bytes at the end of a page that are in no block."""
        del page_size
        return 0

    @abstractmethod
    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """The shape of one page as stored."""

    @abstractmethod
    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, contiguous."""

    @abstractmethod
    def to_layout(self, page_size: int) -> GroupLayout:
        """The same for a worker record and a handshake."""

    @abstractmethod
    def stored_in(self, stored: KVFormat) -> GroupSpec:
        """The group with its rows in another format. Raises ConfigError for rows that it cannot hold."""


class TokenGroupSpec(GroupSpec):
    """A group whose pages hold rows of tokens, stored in the model's `dtype` or quantised."""

    dtype: torch.dtype
    stored: KVFormat
    tile_order: str

    @property
    @abstractmethod
    def row_dim(self) -> int:
        """Values of one row."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: all layers, contiguous."""
        return prod(self.page_shape(page_size)) * self.element.itemsize

    @property
    def element(self) -> torch.dtype:
        """What the pool's tensor holds."""
        return self.stored.element or self.dtype

    @property
    def stored_dtype(self) -> str:
        """What a layout says that rows are stored as."""
        if self.stored is KVFormat.AUTO:
            return str(self.dtype).removeprefix("torch.")
        return self.stored.description

    def to_layout(self, page_size: int) -> GroupLayout:
        return group_layout(self, page_size, self.stored_dtype, self.tile_order)


@dataclass(frozen=True)
class KVGroupSpec(TokenGroupSpec):
    """Layers whose K and V behave alike and share one page table.

    `layer_ids` are the model's layer numbers; a page holds them in this order. With `window`, a query at
    position p sees keys at p - window + 1 .. p. `tile_order` names the order inside a `[page_size,
    head_dim]` tile: "plain" is token-major; an attention backend may define another. `dtype` is what the
    model computes; `stored` says how the pool holds it.
    """

    layer_ids: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    name: str = "full"
    v_head_dim: int | None = None
    tile_order: str = "plain"
    window: int | None = None
    stored: KVFormat = KVFormat.AUTO

    def __post_init__(self) -> None:
        """Refuse heads whose K and V differ in width: one page holds K and V tiles of one shape."""
        self.stored.check_row(self.head_dim)
        if self.v_head_dim not in (None, self.head_dim):
            raise ConfigError(
                "model",
                f"values are {self.v_head_dim} wide and keys {self.head_dim}",
                "serve a model whose key and value heads are equally wide",
            )

    @property
    def row_dim(self) -> int:
        """A token's key, or value, in one head."""
        return self.head_dim

    @property
    def blocks(self) -> int:
        """K and V of each layer."""
        return 2 * len(self.layer_ids)

    @property
    def kind(self) -> str:
        """ "window" or "full"."""
        return "full" if self.window is None else "window"

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """`[layer, 2 (K, V), head, page_size, head_dim]`; of fp4 the last are a tile's bytes, per row."""
        return (len(self.layer_ids), 2, self.kv_heads, page_size, _row_elements(self.stored, self.head_dim))

    def stored_in(self, stored: KVFormat) -> KVGroupSpec:
        return replace(self, stored=stored)


@dataclass(frozen=True)
class LatentGroupSpec(TokenGroupSpec):
    """Layers of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's row is its normed
    latent, `kv_lora_rank` values, and then its rotated key part, `rope_dim` values, shared by all heads.
    With sparse attention (DeepSeek-V3.2-Exp) the indexer's key of the token, `index_dim` values, follows.
    Layers without an indexer of their own do not use it.

    A page has no heads to divide: ranks that divide a model's heads would each hold the same pages, and one
    of them would send them. They would divide the pages of a `KVGroupSpec`.
    """

    layer_ids: tuple[int, ...]
    kv_lora_rank: int
    rope_dim: int
    dtype: torch.dtype
    name: str = "latent"
    stored: KVFormat = KVFormat.AUTO
    tile_order: str = "plain"
    index_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse rows that `stored` cannot hold."""
        self.stored.check_row(self.key_dim)
        self.stored.check_row(self.index_dim)

    @property
    def kind(self) -> str:
        """ "latent"."""
        return "latent"

    @property
    def key_dim(self) -> int:
        """Values of a row that attention reads."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Values of one token in one layer."""
        return self.key_dim + self.index_dim

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """`[layer, page_size, kv_lora_rank + rope_dim + index_dim]`; of fp4 the last are a tile's bytes, per
        row."""
        return (len(self.layer_ids), page_size, _row_elements(self.stored, self.row_dim))

    def stored_in(self, stored: KVFormat) -> LatentGroupSpec:
        return replace(self, stored=stored)


@dataclass(frozen=True)
class StateTensor:
    """One tensor of one layer's state, e.g. `StateTensor(3, "conv", (96, 4), torch.float32)`."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor of one sequence."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateGroupSpec(GroupSpec):
    """Layers that keep a state of fixed size per sequence. A page of this group is one slot: every tensor of
    every layer, each aligned to SLOT_ALIGN, so that a state is one contiguous block to copy, send and
    store."""

    tensors: tuple[StateTensor, ...]
    name: str = "state"

    @property
    def kind(self) -> str:
        """ "state"."""
        return "state"

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The layers, in order."""
        return tuple(dict.fromkeys(tensor.layer for tensor in self.tensors))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte in a slot at which each tensor starts; one more for the end of the slot."""
        offsets = [0]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + -(-tensor.nbytes // SLOT_ALIGN) * SLOT_ALIGN)
        return tuple(offsets)

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """`[bytes]`, whatever the page size."""
        return (self.page_bytes(page_size),)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one slot, whatever the page size."""
        del page_size
        return self.offsets[-1]

    def to_layout(self, page_size: int) -> GroupLayout:
        """The dtype names every tensor's, so that equal layouts mean equal slots."""
        described = ",".join(f"{t.layer}.{t.name}:{t.dtype}{list(t.shape)}" for t in self.tensors)
        return group_layout(self, page_size, described.replace("torch.", ""), "plain")

    def stored_in(self, stored: KVFormat) -> StateGroupSpec:
        """The group as it is: states are in no format of rows."""
        del stored
        return self


def _row_elements(stored: KVFormat, values: int) -> int:
    return values if stored is KVFormat.AUTO else stored.row_bytes(values)


def group_layout(spec: GroupSpec, page_size: int, dtype: str, tile_order: str) -> GroupLayout:
    """The layout of a group whose values are in `dtype`."""
    return GroupLayout(
        name=spec.name,
        kind=spec.kind,
        shape=spec.page_shape(page_size),
        dtype=dtype,
        tile_order=tile_order,
        page_size=page_size,
        page_bytes=spec.page_bytes(page_size),
    )


def stored_as(groups: tuple[GroupSpec, ...], stored: KVFormat) -> tuple[GroupSpec, ...]:
    """The groups with their keys, values and latents stored in the format `stored`; states do not change.

    Raises ConfigError for rows that the format cannot hold.
    """
    return tuple(group.stored_in(stored) for group in groups)


def rank_spec(spec: GroupSpec, ranks: int) -> GroupSpec:
    """What one of several ranks has of a group: its share of the heads, or all of what has none."""
    if not isinstance(spec, KVGroupSpec):
        return spec
    return replace(spec, kv_heads=rank_heads(spec.kv_heads, ranks))


def rank_heads(kv_heads: int, ranks: int) -> int:
    """The KV heads of one of several ranks. Of fewer heads than ranks, each belongs to several ranks that
    follow one another."""
    assert kv_heads % ranks == 0 or ranks % kv_heads == 0, "heads are not cut"
    return max(1, kv_heads // ranks)


def pages_in(
    nbytes: int,
    specs: tuple[GroupSpec, ...],
    page_size: int,
    window_ratio: float | None = None,
    state_slots: int = 0,
) -> int:
    """How many pages of the primary group fit into `nbytes` beside the other groups' pools.

    A window group has `window_ratio` as many pages, None: its own ratio; a state group has `state_slots`
    slots, and every group its scratch page.
    """
    per_page = 0.0
    for spec in specs:
        size = spec.page_bytes(page_size)
        nbytes -= size
        if spec.kind == "state":
            nbytes -= state_slots * size
        else:
            per_page += size * ((window_ratio or spec.window_ratio) if spec.kind == "window" else 1.0)
    assert per_page > 0, "no group has a page that grows with the tokens"
    return max(0, int(nbytes / per_page))
