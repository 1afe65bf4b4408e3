"""Copiers: move pages between the device's pools and the host's arenas, and wait for it.

They run on the mover's threads, never on the engine loop, but for what write-back copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from kvcache.allocator import Pages
from kvcache.page_runs import as_pages, copy_pages
from kvcache.pool import KVCache
from kvcache.tiers.host_pool import HostPool

_PIECE_BYTES = 8 << 20
"""Copied at once: what a paced copy may take beyond its pace, and one GPU copy."""

IdsByGroup = Mapping[str, Pages]


class Copier(Protocol):
    """Page `device[group][i]` of the device and page `host[group][i]` of the host are the same. Ids are not
    0. Blocks until the bytes are there. Returns how many they are."""

    def to_host(self, device: IdsByGroup, host: IdsByGroup) -> int: ...

    def to_device(self, device: IdsByGroup, host: IdsByGroup) -> int: ...


class HostCopier:
    """The device's pools are in the host's memory, too: memcpy."""

    def __init__(self, pools: Mapping[str, KVCache], host: HostPool, bytes_per_s: float = 0.0) -> None:
        """At most `bytes_per_s` go to the host; 0: no limit."""
        self._pools = pools
        self._host = host
        self._bytes_per_s = bytes_per_s

    def to_host(self, device: IdsByGroup, host: IdsByGroup) -> int:
        """See Copier."""
        start, done = time.monotonic(), 0
        for group, at in _pieces(device, self._pools):
            pool, arena = self._pools[group], self._host.arenas[group]
            src, dst = as_pages(device[group][at]), as_pages(host[group][at])
            copy_pages(pool.bytes.data_ptr(), src, arena.bytes.data_ptr(), dst, pool.page_bytes)
            done += len(src) * pool.page_bytes
            if self._bytes_per_s:
                time.sleep(max(0.0, start + done / self._bytes_per_s - time.monotonic()))
        return done

    def to_device(self, device: IdsByGroup, host: IdsByGroup) -> int:
        """See Copier."""
        done = 0
        for group, at in _pieces(device, self._pools):
            pool, arena = self._pools[group], self._host.arenas[group]
            src, dst = as_pages(host[group][at]), as_pages(device[group][at])
            copy_pages(arena.bytes.data_ptr(), src, pool.bytes.data_ptr(), dst, pool.page_bytes)
            done += len(src) * pool.page_bytes
        return done


class CudaCopier:
    """The device is a GPU and the host's arenas are pinned: copies on a stream of their own, each waited for.

    Nothing orders this stream and that of the forwards on the device, because the host does: a page is
    backed up after the completion of the forward that wrote it, and read by forwards that are launched after
    its load has ended.
    """

    def __init__(self, pools: Mapping[str, KVCache], host: HostPool, bytes_per_s: float = 0.0) -> None:
        self._pools = pools
        self._host = host
        self._bytes_per_s = bytes_per_s
        self._stream = torch.cuda.Stream(next(iter(pools.values())).device)  # type: ignore[no-untyped-call]

    def to_host(self, device: IdsByGroup, host: IdsByGroup) -> int:
        """See Copier."""
        start, done = time.monotonic(), 0
        for group, at in _pieces(device, self._pools):
            pool, arena = self._pools[group], self._host.arenas[group]
            for page, copy in zip(device[group][at].tolist(), host[group][at].tolist(), strict=True):
                with torch.cuda.stream(self._stream):
                    arena.bytes[copy].copy_(pool.bytes[page], non_blocking=True)
            self._stream.synchronize()
            done += pool.page_bytes * (at.stop - at.start)
            if self._bytes_per_s:
                time.sleep(max(0.0, start + done / self._bytes_per_s - time.monotonic()))
        return done

    def to_device(self, device: IdsByGroup, host: IdsByGroup) -> int:
        """See Copier."""
        done = 0
        for group, at in _pieces(device, self._pools):
            pool, arena = self._pools[group], self._host.arenas[group]
            for page, copy in zip(device[group][at].tolist(), host[group][at].tolist(), strict=True):
                with torch.cuda.stream(self._stream):
                    pool.bytes[page].copy_(arena.bytes[copy], non_blocking=True)
            self._stream.synchronize()
            done += pool.page_bytes * (at.stop - at.start)
        return done


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
