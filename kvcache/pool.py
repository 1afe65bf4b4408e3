"""Pools: rows that map a request's positions to slots, and the pages that hold keys and values.

Index metadata is numpy on the host; a GPU only ever sees per-batch copies. Row 0 and page 0 are never handed
out: padded rows of a batch read and write there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvcache.buffers import PoolBuffer, allocate_private
from kvcache.entry_layout import EntryGroupSpec
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec, StateGroupSpec, TokenGroupSpec
from kvcache.page_parts import PageParts
from kvcache.quant import KVFormat, QuantisedRows

Spec = TypeVar("Spec", bound=TokenGroupSpec)


class ReqToTokenPool:
    """`req_to_token[row, position]` is the slot of a request's token; int32, one row per request.

    A decode worker has `pre_alloc_size` rows more, for requests whose KV is still arriving. Rows are whole
    pages long: a row names every slot of its last page, also beyond `max_context_len`.
    """

    def __init__(self, size: int, max_context_len: int, pre_alloc_size: int = 0, page_size: int = 1) -> None:
        self.size = size + pre_alloc_size
        self.pre_alloc_size = pre_alloc_size
        self.max_context_len = max_context_len
        # np.zeros: untouched rows cost no memory until a request is long enough to reach them.
        width = -(-max_context_len // page_size) * page_size
        self.req_to_token: npt.NDArray[np.int32] = np.zeros((self.size + 1, width), np.int32)
        self._free: deque[int] = deque()
        self._is_free = np.zeros(self.size + 1, bool)
        self.clear()

    def alloc(self, n: int) -> list[int] | None:
        """`n` rows, those longest free first. None, and no row is allocated, if there are too few."""
        if n > len(self._free):
            return None
        rows = [self._free.popleft() for _ in range(n)]
        self._is_free[rows] = False
        return rows

    def free(self, rows: int | Sequence[int]) -> None:
        """Give rows back."""
        for row in (rows,) if isinstance(rows, int) else rows:
            assert 0 < row <= self.size, f"row {row} does not exist"
            assert not self._is_free[row], f"row {row} is free already"
            self._is_free[row] = True
            self._free.append(row)

    def write(self, row: int, start: int, slots: npt.NDArray[np.integer]) -> None:
        """Positions `[start, start + len(slots))` of a row."""
        assert start + len(slots) <= self.req_to_token.shape[1], "past the end of the row"
        self.req_to_token[row, start : start + len(slots)] = slots

    def available_size(self) -> int:
        """Rows that can be handed out."""
        return len(self._free)

    def free_rows(self) -> npt.NDArray[np.int64]:
        """The rows that can be handed out, in that order (a copy)."""
        return np.fromiter(self._free, np.int64, len(self._free))

    def clear(self) -> None:
        """Every row is free again."""
        self._free = deque(range(1, self.size + 1))
        self._is_free[1:] = True


class KVCache:
    """The pages of one KV group: page-major, so that one page is one contiguous blob of `page_bytes`.

    `bytes` is the storage as uint8 `[num_pages + 1, page_bytes]`. `fd` is what another process
    can map of it, a memfd or a GPU's exported memory, from offset 0; None when the pool is private or has no
    bytes.
    """

    def __init__(
        self,
        spec: GroupSpec,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        buffer: PoolBuffer | None = None,
    ) -> None:
        """Pages 1..num_pages plus the scratch page 0, in `buffer` if there is one; `close` closes it."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = spec.page_bytes(page_size)
        self.page_parts = PageParts(spec.blocks, tail=spec.tail_bytes(page_size))
        self.device = torch.device(device)
        self.fd = buffer.fd if buffer is not None else None
        self._buffer = buffer
        nbytes = self.bytes_needed(spec, num_pages, page_size)
        if buffer is not None:
            assert buffer.tensor.device.type == self.device.type, "the buffer is on another device"
            self._storage = buffer.tensor[:nbytes]
        elif self.device.type == "cpu" and nbytes:
            self._storage = allocate_private(nbytes).tensor[:nbytes]
        else:  # a full group of no layers has no bytes
            self._storage = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self.bytes = self._storage.view(num_pages + 1, self.page_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, scratch page included."""
        return self.bytes.numel()

    def close(self) -> None:
        """Close the buffer and its descriptor. A tensor over it stays usable."""
        if self._buffer is not None:
            self._buffer.close()

    @staticmethod
    def bytes_needed(spec: GroupSpec, num_pages: int, page_size: int) -> int:
        """Bytes of a pool of `num_pages`, scratch page included."""
        return (num_pages + 1) * spec.page_bytes(page_size)


class TokenKVCache(KVCache, Generic[Spec]):
    """Pages whose last dimensions are `[page_size, one row of a token]`: `data[page, ...]` has the group's
    shape. Quantised pools hold codes there: float8 elements, or bytes of fp4 in tiles of `[data | scales]`.
    """

    def __init__(
        self,
        spec: Spec,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        buffer: PoolBuffer | None = None,
    ) -> None:
        super().__init__(spec, num_pages, page_size, device, buffer)
        self._show(spec, self._storage.view(spec.element).view(num_pages + 1, *spec.page_shape(page_size)))

    def _show(self, spec: Spec, data: torch.Tensor) -> None:
        """Part of the constructor. `data` is all of the storage, or what is seen of it."""
        self.spec = spec
        self.data = data
        self._rows: QuantisedRows | None = None
        if spec.stored is not KVFormat.AUTO:
            codes = self.data.view(torch.uint8).flatten(-2)
            self._rows = QuantisedRows(codes, spec.stored, self.data.shape[-2], spec.row_dim)
        self._layer_index = {layer: index for index, layer in enumerate(spec.layer_ids)}

    def _put(self, index: tuple[Any, ...], values: torch.Tensor, first: int = 0) -> None:
        """To rows from their value `first` on. `values` are in the model's dtype: a conversion here would
        hide a wrong dtype elsewhere."""
        assert values.dtype == self.spec.dtype, f"{values.dtype} into a pool of {self.spec.dtype}"
        if self._rows is None:
            self.data[..., first : first + values.shape[-1]][index] = values
        else:
            self._rows.write(index, values, first)

    def _read(self, index: tuple[Any, ...], first: int = 0, end: int | None = None) -> torch.Tensor:
        """Values `[first, end)` of rows in the model's dtype, dequantised where the pool is quantised."""
        if self._rows is None:
            return self.data[..., first:end][index]
        return self._rows.read(index)[..., first:end].to(self.spec.dtype)


class MHAKVCache(TokenKVCache[KVGroupSpec]):
    """Keys and values of multi-head attention: `data[page, layer, K or V, head, offset, head_dim]`."""

    def set_kv_buffer(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write `k`, `v` `[tokens, head, head_dim]` of model layer `layer` at `slots` (int64 `[tokens]`)."""
        self.write(self._layer_index[layer], slots // self.page_size, slots % self.page_size, k, v)

    def write(
        self, place: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """The same at `offsets` in `pages` (int64 `[tokens]`) of the layer at `place` in a page."""
        for side, values in enumerate((k, v)):
            self._put((pages, place, side, slice(None), offsets), values)

    def read_pages(self, place: int, pages: torch.Tensor) -> torch.Tensor:
        """`[pages, K or V, head, page_size, head_dim]` of the layer at `place` in a page, copied."""
        return self._read((pages, place))


class HeadsOfKVCache(MHAKVCache):
    """Some heads of another MHAKVCache, in its memory: what one of several ranks reads and writes."""

    def __init__(self, whole: MHAKVCache, heads: range) -> None:
        spec = whole.spec
        KVCache.__init__(
            self, spec, whole.num_pages, whole.page_size, whole.device, PoolBuffer(whole.bytes.view(-1))
        )
        self._show(replace(spec, kv_heads=len(heads)), whole.data[:, :, :, heads.start : heads.stop])


class MLAKVCache(TokenKVCache[LatentGroupSpec]):
    """Latents: `data[page, layer, offset, kv_lora_rank + rope_dim + index_dim]`,
    the parts of a row in this order."""

    def set_mla_kv_buffer(
        self, layer: int, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Write `latent` `[tokens, kv_lora_rank]` and `rope` `[tokens, rope_dim]` of a model layer."""
        self.write(self._layer_index[layer], slots // self.page_size, slots % self.page_size, latent, rope)

    def write(
        self, place: int, pages: torch.Tensor, offsets: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """The same at `offsets` in `pages` (int64 `[tokens]`) of the layer at `place` in a page."""
        assert latent.dtype == rope.dtype, f"a latent in {latent.dtype} with its rope part in {rope.dtype}"
        self._put((pages, place, offsets), torch.cat((latent, rope), dim=-1))

    def write_index(self, place: int, pages: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor) -> None:
        """Write the indexer's `keys` `[tokens, index_dim]`, or first values of these, as write() does
        latents."""
        assert keys.shape[-1] <= self.spec.index_dim
        self._put((pages, place, offsets), keys, self.spec.key_dim)

    def get_rows(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """`[tokens, kv_lora_rank + rope_dim]` of a model layer in the model's dtype, copied."""
        return self._read(self._place(layer, slots), 0, self.spec.key_dim)

    def read_index(self, place: int, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The indexer's keys at `offsets` in `pages` of the layer at `place` in a page, copied."""
        return self._read((pages, place, offsets), self.spec.key_dim)

    def get_index(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The indexer's keys, `[tokens, index_dim]`, of a model layer in the model's dtype, copied."""
        return self._read(self._place(layer, slots), self.spec.key_dim)

    def _place(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return slots // self.page_size, self._layer_index[layer], slots % self.page_size


class RowsOfKVCache(MLAKVCache):
    """Every row of another MLAKVCache, in its memory, as a page of one token and one layer."""

    def __init__(self, whole: MLAKVCache) -> None:
        rows = whole.data.shape[:3].numel()
        spec = replace(whole.spec, layer_ids=whole.spec.layer_ids[:1])
        super().__init__(spec, rows - 1, 1, whole.device, PoolBuffer(whole.bytes.view(-1)))


class EntryKVCache(KVCache):
    """Rows of layers that differ in width, and in how many tokens a row stands for: `data[page, value]`."""

    def __init__(
        self,
        spec: EntryGroupSpec,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        buffer: PoolBuffer | None = None,
    ) -> None:
        super().__init__(spec, num_pages, page_size, device, buffer)
        self.spec = spec
        self.data = self._storage.view(spec.dtype).view(num_pages + 1, *spec.page_shape(page_size))
        self._rows: dict[int, torch.Tensor] = {}
        start = 0
        for rows in spec.rows:
            count = rows.of_page(page_size)
            end = start + count * rows.width
            self._rows[rows.layer] = self.data[:, start:end].view(num_pages + 1, count, rows.width)
            start = end

    def rows(self, layer: int) -> torch.Tensor:
        """`[num_pages + 1, rows of a page, width]` of a layer, a view: writing to it writes the pool."""
        return self._rows[layer]


class MambaPool(KVCache):
    """States of linear attention, Mamba and short convolutions: slots 1..num_pages, a page being a slot.

    Padded rows write to slot 0. Slots are not zeroed: a forward is told when it starts without a state.
    """

    def __init__(
        self,
        spec: StateGroupSpec,
        num_slots: int,
        device: str | torch.device = "cpu",
        buffer: PoolBuffer | None = None,
    ) -> None:
        super().__init__(spec, num_slots, 1, device, buffer)
        self.spec = spec
        self._tensors: dict[tuple[int, str], torch.Tensor] = {
            (tensor.layer, tensor.name): self.bytes[:, start : start + tensor.nbytes]
            .view(tensor.dtype)
            .view(num_slots + 1, *tensor.shape)
            for tensor, start in zip(spec.tensors, spec.offsets, strict=False)
        }

    def tensor(self, layer: int, name: str) -> torch.Tensor:
        """`[num_slots + 1, *shape]` of one layer's tensor, a view: writing to it writes the pool."""
        return self._tensors[layer, name]
