"""A model in several ranks, in real processes, without a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.loader import load_model
from engine.ranks.pools import own_heads
from engine.ranks.ranks import Ranks
from engine.runner import ModelRunner
from kvcache.buffers import allocate_shared
from kvcache.layout import KVGroupSpec
from kvcache.pool import KVCache, MHAKVCache

TIMEOUT_S = 30.0


@contextmanager
def open_ranks(
    path: Path, size: int, page_size: int, num_pages: int, **options: Any
) -> Iterator[tuple[ModelRunner, Ranks]]:
    """A runner, in float32 unless the options of EngineConfig say otherwise, and its other ranks."""
    config = EngineConfig(str(path), **{"dtype": "float32", "overlap": False, **options})
    with Ranks(config, size, TIMEOUT_S) as ranks:
        loaded = load_model(config, ranks.group)
        ranks.await_loaded()
        pools: dict[str, KVCache] = {}
        for spec in loaded.spec.groups:
            assert isinstance(spec, KVGroupSpec)
            nbytes = KVCache.bytes_needed(spec, num_pages, page_size)
            buffer = allocate_shared(nbytes) if nbytes else None
            pools[spec.name] = MHAKVCache(spec, num_pages, page_size, buffer=buffer)
        ranks.open_pools(pools)
        runner = ModelRunner(loaded, own_heads(pools, ranks.group), config, ranks=ranks)
        try:
            yield runner, ranks
        finally:
            runner.close()
            for pool in pools.values():
                pool.close()
