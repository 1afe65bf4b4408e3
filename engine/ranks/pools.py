"""The pools of several ranks: each sees its heads of pages that all of them map.

On a CPU the ranks of a worker share the memory of its pages. A page has its heads in order, so that those of
a rank are a slice of it; caches, transfers and tiers see whole pages, as if there were one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.parallel.group import RankGroup
from engine.ranks.messages import OpenPools, RankSocket
from kvcache.buffers import SharedBuffer
from kvcache.layout import GroupSpec, KVGroupSpec
from kvcache.pool import HeadsOfKVCache, KVCache, MHAKVCache


def own_heads(pools: Mapping[str, KVCache], group: RankGroup) -> dict[str, KVCache]:
    """This rank's heads of whole pools, in the same memory."""
    return {name: _heads(pool, group) for name, pool in pools.items()}


def describe(pools: Mapping[str, KVCache]) -> tuple[OpenPools, list[int]]:
    """What another rank needs to map them, and the descriptors that follow."""
    (page_size,) = {pool.page_size for pool in pools.values()}
    fds = [pool.fd for pool in pools.values() if pool.page_bytes]
    assert None not in fds, "the pools are in memory that can be mapped"
    return (
        OpenPools({name: pool.num_pages for name, pool in pools.items()}, page_size),
        [fd for fd in fds if fd is not None],
    )


def map_pools(
    opened: OpenPools, specs: Iterable[GroupSpec], group: RankGroup, orders: RankSocket
) -> dict[str, KVCache]:
    """This rank's heads of the pools that rank 0 has opened."""
    by_name = {spec.name: spec for spec in specs}
    have_bytes = [name for name in opened.num_pages if by_name[name].page_bytes(opened.page_size)]
    fds = dict(zip(have_bytes, orders.receive_fds(len(have_bytes)), strict=True))
    pools = {}
    for name, pages in opened.num_pages.items():
        spec = by_name[name]
        assert isinstance(spec, KVGroupSpec), "only heads are divided"
        buffer = None
        if name in fds:
            buffer = SharedBuffer(fds[name], KVCache.bytes_needed(spec, pages, opened.page_size))
        pools[name] = MHAKVCache(spec, pages, opened.page_size, buffer=buffer)
    return own_heads(pools, group)


def _heads(pool: KVCache, group: RankGroup) -> KVCache:
    assert isinstance(pool, MHAKVCache), "only heads are divided"
    count = pool.spec.kv_heads // group.size
    return HeadsOfKVCache(pool, range(count * group.rank, count * (group.rank + 1)))
