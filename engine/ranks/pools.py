"""The pools of several ranks: each has its heads of pages that rank 0 manages.

On a CPU the ranks of a worker share the memory of whole pages. A page has its heads in order, so that those
of a rank are a slice of it. GPUs have a part of each page each (kvcache/divided.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from common.errors import ConfigError
from engine.parallel.group import RankGroup
from engine.ranks.messages import OpenPools, RankSocket
from kvcache.buffers import PoolBuffer, SharedBuffer
from kvcache.device_memory import DeviceError, device_memory
from kvcache.divided import DividedKVCache
from kvcache.layout import GroupSpec, KVGroupSpec
from kvcache.pool import HeadsOfKVCache, KVCache, MHAKVCache


def own_heads(pools: Mapping[str, KVCache], group: RankGroup) -> dict[str, KVCache]:
    """This rank's heads of rank 0's pools, in the same memory."""
    return {name: _heads(pool, group) for name, pool in pools.items()}


class Shown(NamedTuple):
    """What another rank needs to map its pools: the descriptors follow the message."""

    message: OpenPools
    fds: list[int]


def show(pools: Mapping[str, KVCache], rank: int) -> Shown:
    """Rank 0's pools for another rank."""
    (page_size,) = {pool.page_size for pool in pools.values()}
    divided = any(isinstance(pool, DividedKVCache) for pool in pools.values())
    fds = []
    for pool in pools.values():
        if pool.page_bytes:
            fd = pool.parts[rank].fd if isinstance(pool, DividedKVCache) else pool.fd
            assert fd is not None, "the pools are in memory that can be mapped"
            fds.append(fd)
    pages = {name: pool.num_pages for name, pool in pools.items()}
    return Shown(OpenPools(pages, page_size, divided), fds)


def map_pools(
    opened: OpenPools,
    specs: Iterable[GroupSpec],
    group: RankGroup,
    device: torch.device,
    orders: RankSocket,
) -> dict[str, KVCache]:
    """This rank's heads of the pools that rank 0 has opened."""
    by_name = {spec.name: spec for spec in specs}
    have_bytes = [name for name in opened.num_pages if by_name[name].page_bytes(opened.page_size)]
    fds = dict(zip(have_bytes, orders.receive_fds(len(have_bytes)), strict=True))
    pools: dict[str, KVCache] = {}
    for name, pages in opened.num_pages.items():
        spec = by_name[name]
        assert isinstance(spec, KVGroupSpec), "only heads are divided"
        if opened.divided:
            spec = replace(spec, kv_heads=spec.kv_heads // group.size)
        nbytes = KVCache.bytes_needed(spec, pages, opened.page_size)
        buffer = _mapped(fds[name], nbytes, device) if name in fds else None
        pools[name] = MHAKVCache(spec, pages, opened.page_size, device, buffer)
    return pools if opened.divided else own_heads(pools, group)


def _mapped(fd: int, nbytes: int, device: torch.device) -> PoolBuffer:
    """Memory that rank 0 has allocated; owns `fd`."""
    if device.type == "cpu":
        return SharedBuffer(fd, nbytes)
    memory = device_memory(device)
    try:
        if memory is None:
            raise DeviceError("see the log")
        return PoolBuffer(memory.tensor_at(memory.open(fd, nbytes)), fd)
    except DeviceError as error:
        raise ConfigError("tp_size", f"{device} does not map its pools: {error}", "use 1") from error


def _heads(pool: KVCache, group: RankGroup) -> KVCache:
    if isinstance(pool, DividedKVCache):
        return pool.parts[group.rank]
    assert isinstance(pool, MHAKVCache), "only heads are divided"
    count = pool.spec.kv_heads // group.size
    return HeadsOfKVCache(pool, range(count * group.rank, count * (group.rank + 1)))
