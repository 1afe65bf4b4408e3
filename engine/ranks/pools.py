"""The pools of several ranks: each has its part of pages that rank 0 manages.

On a CPU the ranks of a worker share the memory of keys and values. A page has its heads in order, so that
those of a rank are a slice of it. GPUs have memory of their own each, and so have all ranks for latents and
states (kvcache/divided.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from common.errors import ConfigError
from engine.parallel.group import RankGroup
from engine.ranks.messages import OpenPools, RankSocket
from kvcache.buffers import PoolBuffer, SharedBuffer
from kvcache.device_memory import DeviceError, device_memory
from kvcache.divided import SpreadKVCache
from kvcache.indexed_pool import HeadsOfIndexedKVCache, IndexedKVCache
from kvcache.layout import GroupSpec, rank_heads, rank_spec
from kvcache.open_pool import open_pool
from kvcache.pool import HeadsOfKVCache, KVCache, MHAKVCache


def own_part(pools: Mapping[str, KVCache], group: RankGroup) -> dict[str, KVCache]:
    """What this rank has of rank 0's pools, in the same memory."""
    return {
        name: pool.parts[group.rank] if isinstance(pool, SpreadKVCache) else _heads(pool, group)
        for name, pool in pools.items()
    }


class SharedPools(NamedTuple):
    """What another rank needs to map its pools: the descriptors follow the message."""

    message: OpenPools
    fds: list[int]


def show(pools: Mapping[str, KVCache], rank: int) -> SharedPools:
    """Rank 0's pools for another rank."""
    page_size = max(pool.page_size for pool in pools.values())  # a state's is 1
    fds = []
    for pool in pools.values():
        if pool.page_bytes:
            fd = pool.parts[rank].fd if isinstance(pool, SpreadKVCache) else pool.fd
            assert fd is not None, "the pools are in memory that can be mapped"
            fds.append(fd)
    own = [name for name, pool in pools.items() if isinstance(pool, SpreadKVCache)]
    return SharedPools(OpenPools({name: pool.num_pages for name, pool in pools.items()}, page_size, own), fds)


def map_pools(
    opened: OpenPools,
    specs: Iterable[GroupSpec],
    group: RankGroup,
    device: torch.device,
    orders: RankSocket,
) -> dict[str, KVCache]:
    """This rank's part of the pools that rank 0 has opened."""
    by_name = {spec.name: rank_spec(spec, group.size) if spec.name in opened.own else spec for spec in specs}
    have_bytes = [name for name in opened.num_pages if by_name[name].page_bytes(opened.page_size)]
    fds = dict(zip(have_bytes, orders.receive_fds(len(have_bytes)), strict=True))
    pools: dict[str, KVCache] = {}
    for name, pages in opened.num_pages.items():
        spec = by_name[name]
        nbytes = KVCache.bytes_needed(spec, pages, opened.page_size)
        buffer = _mapped(fds[name], nbytes, device) if name in fds else None
        pool = open_pool(spec, pages, opened.page_size, device, buffer)
        pools[name] = pool if name in opened.own else _heads(pool, group)
    return pools


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
    assert isinstance(pool, MHAKVCache), "only keys and values have heads"
    first = pool.spec.kv_heads * group.rank // group.size
    heads = range(first, first + rank_heads(pool.spec.kv_heads, group.size))
    if isinstance(pool, IndexedKVCache):
        return HeadsOfIndexedKVCache(pool, heads)
    return HeadsOfKVCache(pool, heads)
