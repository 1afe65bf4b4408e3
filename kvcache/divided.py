"""Pools of several ranks: each rank has memory of its own, and together they are one pool.

SpreadKVCache
  DividedKVCache      keys and values: each part has a range of the heads
  ReplicatedKVCache   latents and states, which have no heads to divide: each part has all of it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from kvcache.layout import GroupSpec, KVGroupSpec, rank_heads
from kvcache.page_parts import PageParts
from kvcache.pool import KVCache, MHAKVCache


class SpreadKVCache(KVCache):
    """A page is the same blob as in one memory, put together when it is read: whoever copies pages, sends
    them or stores them does not know how many parts there are. It cannot be mapped whole, so `fd` is None;
    each part has its own.
    """

    def __init__(self, spec: GroupSpec, parts: Sequence[KVCache], page_parts: PageParts) -> None:
        """`spec` is of the whole. Owns the parts, which are equal but for their device."""
        first = parts[0]
        self.parts = tuple(parts)
        self.page_parts = page_parts
        self.num_pages = first.num_pages
        self.page_size = first.page_size
        self.page_bytes = spec.page_bytes(first.page_size)
        self.device = first.device
        self.fd = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def close(self) -> None:
        for part in self.parts:
            part.close()

    @abstractmethod
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The pages `ids` (int64 `[n]`, pinned or on the first device) as uint8 `[n, page_bytes]`, on the
        first device. Nothing waits."""

    def write(self, ids: torch.Tensor, pages: torch.Tensor) -> None:
        """Overwrite the pages `ids` with `pages`, uint8 `[n, page_bytes]` on the first device. Nothing waits;
        what is queued on the first device's current stream after this comes after it."""
        for number, part in enumerate(self.parts):
            piece = self._piece(pages, number).to(part.device, non_blocking=True)
            there = ids.to(part.device, non_blocking=True)
            part.bytes.index_copy_(0, there, piece.reshape(len(ids), -1))
            if part.device != self.device:
                _order_after(self.device, part.device)

    @abstractmethod
    def _piece(self, pages: torch.Tensor, number: int) -> torch.Tensor:
        """What a part has of these pages."""


class DividedKVCache(SpreadKVCache):
    """The pages of an MHAKVCache, of which each part has a range of heads, the first ones in part 0. Of fewer
    heads than parts, each is in several parts that follow one another. An indexer's keys are in each."""

    def __init__(self, spec: KVGroupSpec, parts: Sequence[MHAKVCache]) -> None:
        own = parts[0].spec.kv_heads
        assert own == rank_heads(spec.kv_heads, len(parts)), "the parts have all heads"
        ranges = spec.kv_heads // own
        tail = spec.tail_bytes(parts[0].page_size)
        super().__init__(spec, parts, PageParts(spec.blocks, ranges, len(parts) // ranges, tail))

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        pages = [
            part.bytes.index_select(0, ids.to(part.device, non_blocking=True)).to(
                self.device, non_blocking=True
            )
            for part in self.parts[:: self.page_parts.copies]
        ]
        end = pages[0].shape[1] - self.page_parts.tail
        heads = [page[:, :end].reshape(len(ids), self.page_parts.blocks, -1) for page in pages]
        whole = torch.stack(heads, dim=2).view(len(ids), -1)
        return torch.cat((whole, pages[0][:, end:]), dim=1) if self.page_parts.tail else whole

    def _piece(self, pages: torch.Tensor, number: int) -> torch.Tensor:
        blocks, ranges, _, tail = self.page_parts
        end = self.page_bytes - tail
        heads = pages[:, :end].view(len(pages), blocks, ranges, -1)[:, :, self.page_parts.range_of(number)]
        return torch.cat((heads.flatten(1), pages[:, end:]), dim=1) if tail else heads


class ReplicatedKVCache(SpreadKVCache):
    """Pages of which every part has a copy. The ranks compute the same for each."""

    def __init__(self, spec: GroupSpec, parts: Sequence[KVCache]) -> None:
        super().__init__(spec, parts, PageParts(spec.blocks, copies=len(parts)))

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        return self.parts[0].bytes.index_select(0, ids.to(self.device, non_blocking=True))

    def _piece(self, pages: torch.Tensor, number: int) -> torch.Tensor:
        del number
        return pages


def pool_of_parts(spec: GroupSpec, parts: Sequence[KVCache]) -> SpreadKVCache:
    """The whole pool of a group; owns the parts."""
    if isinstance(spec, KVGroupSpec):
        return DividedKVCache(spec, [part for part in parts if isinstance(part, MHAKVCache)])
    return ReplicatedKVCache(spec, parts)


def _order_after(first: torch.device, other: torch.device) -> None:
    """The first device's current stream goes on when the other's has come here."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(other))
    torch.cuda.current_stream(first).wait_event(event)
