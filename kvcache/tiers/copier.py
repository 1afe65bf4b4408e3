"""Copiers: move pages between the device's pools and the host's arenas, and wait for it.

They run on the mover's threads, never on the engine loop, but for what write-back copies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from kvcache.allocator import Pages
from kvcache.divided import SpreadKVCache
from kvcache.page_runs import as_pages, copy_pages
from kvcache.pool import KVCache
from kvcache.tiers.host_pool import HostPool

_PIECE_BYTES = 8 << 20
"""Copied at once: what a paced copy may take beyond its pace, and one GPU copy."""

IdsByGroup = Mapping[str, Pages]


class Copier(ABC):
    """Page `device[group][i]` of the device and page `host[group][i]` of the host are the same. Ids are not
    0. Its calls block until the bytes are there, and return how many they are."""

    def __init__(self, pools: Mapping[str, KVCache], host: HostPool, bytes_per_s: float = 0.0) -> None:
        """At most `bytes_per_s` go to the host; 0: no limit."""
        self._pools = pools
        self._host = host
        self._bytes_per_s = bytes_per_s

    def to_host(self, device: IdsByGroup, host: IdsByGroup) -> int:
        """Back up, at the pace."""
        start, done = time.monotonic(), 0
        for group, at in _pieces(device, self._pools):
            pool, arena = self._pools[group], self._host.arenas[group].bytes
            src, dst = device[group][at], host[group][at]
            with self._until_done():
                if isinstance(pool, SpreadKVCache):
                    pages = pool.read(torch.from_numpy(src.astype(np.int64)))
                    self._copy(pages, np.arange(len(src), dtype=np.int32), arena, dst)
                else:
                    self._copy(pool.bytes, src, arena, dst)
            done += (at.stop - at.start) * pool.page_bytes
            if self._bytes_per_s:
                time.sleep(max(0.0, start + done / self._bytes_per_s - time.monotonic()))
        return done

    def to_device(self, device: IdsByGroup, host: IdsByGroup) -> int:
        """Load."""
        done = 0
        for group, at in _pieces(device, self._pools):
            pool, arena = self._pools[group], self._host.arenas[group].bytes
            src, dst = host[group][at], device[group][at]
            with self._until_done():
                if isinstance(pool, SpreadKVCache):
                    pages = torch.empty(len(src), pool.page_bytes, dtype=torch.uint8, device=pool.device)
                    self._copy(arena, src, pages, np.arange(len(src), dtype=np.int32))
                    pool.write(torch.from_numpy(dst.astype(np.int64)), pages)
                else:
                    self._copy(arena, src, pool.bytes, dst)
            done += (at.stop - at.start) * pool.page_bytes
        return done

    @abstractmethod
    def _copy(self, source: torch.Tensor, src: Pages, target: torch.Tensor, dst: Pages) -> None:
        """Row `src[i]` of `source` to row `dst[i]` of `target`, both uint8 `[pages, page_bytes]`."""

    @abstractmethod
    def _until_done(self) -> AbstractContextManager[None]:
        """Around copies, which are done after it."""


class HostCopier(Copier):
    """The device's pools are in the host's memory, too: memcpy."""

    def _copy(self, source: torch.Tensor, src: Pages, target: torch.Tensor, dst: Pages) -> None:
        page_bytes = source.shape[1]
        copy_pages(source.data_ptr(), as_pages(src), target.data_ptr(), as_pages(dst), page_bytes)

    def _until_done(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaCopier(Copier):
    """The device is a GPU and the host's arenas are pinned: copies on a stream of their own.

    Nothing orders this stream and that of the forwards on the device, because the host does: a page is
    backed up after the completion of the forward that wrote it, and read by forwards that are launched after
    its load has ended.
    """

    def __init__(self, pools: Mapping[str, KVCache], host: HostPool, bytes_per_s: float = 0.0) -> None:
        super().__init__(pools, host, bytes_per_s)
        self._stream = torch.cuda.Stream(next(iter(pools.values())).device)  # type: ignore[no-untyped-call]

    def _copy(self, source: torch.Tensor, src: Pages, target: torch.Tensor, dst: Pages) -> None:
        for page, place in zip(src.tolist(), dst.tolist(), strict=True):
            target[place].copy_(source[page], non_blocking=True)

    @contextmanager
    def _until_done(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def open_copier(pools: Mapping[str, KVCache], host: HostPool, bytes_per_s: float) -> Copier:
    """The copier for the pools' device."""
    on_cpu = next(iter(pools.values())).device.type == "cpu"
    return HostCopier(pools, host, bytes_per_s) if on_cpu else CudaCopier(pools, host, bytes_per_s)


def _pieces(device: IdsByGroup, pools: Mapping[str, KVCache]) -> Iterator[tuple[str, slice]]:
    """Groups and slices of their ids, of a few megabytes each; groups without bytes have none."""
    for group, ids in device.items():
        if page_bytes := pools[group].page_bytes:
            step = max(1, _PIECE_BYTES // page_bytes)
            for first in range(0, len(ids), step):
                yield group, slice(first, min(first + step, len(ids)))


def nonzero(ids: Pages) -> Pages:
    """Those that are page ids."""
    kept: Pages = ids[ids != 0].astype(np.int32)
    return kept
