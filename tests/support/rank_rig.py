"""A model in several ranks, in real processes, without a worker."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from engine.config import EngineConfig
from engine.loader import load_model
from engine.ranks.pools import own_part
from engine.ranks.ranks import Ranks
from engine.runner import ModelRunner
from kvcache.buffers import PoolBuffer, allocate_shared
from kvcache.device_memory import allocate_exported
from kvcache.divided import SpreadKVCache, pool_of_parts
from kvcache.layout import GroupSpec, KVGroupSpec, rank_spec
from kvcache.open_pool import open_pool
from kvcache.pool import KVCache
from tests.harness.fork import ForkedProgram, Passed

TIMEOUT_S = 30.0


def forked_ranks() -> Any:
    """Ranks that are started within it are forked from a process that has imported what they need, which
    takes a new interpreter eight seconds."""

    def forked(command: list[str], pass_fds: list[int], **_: Any) -> ForkedProgram:
        _, _, module, _ = command
        program = ForkedProgram(module, [Passed(pass_fds[0])], os.environ, Path("/dev/stderr"))
        program.stdout.close()
        return program

    return patch.object(subprocess, "Popen", forked)


@contextmanager
def open_ranks(
    path: Path,
    size: int,
    page_size: int,
    num_pages: int,
    divided: bool = False,
    forks: bool = True,
    **options: Any,
) -> Iterator[tuple[ModelRunner, Ranks]]:
    """A runner, in float32 unless the options of EngineConfig say otherwise, and its other ranks. `divided`:
    each has its heads in memory of its own, as on GPUs. `forks`: ranks on CPUs are forked_ranks."""
    config = EngineConfig(str(path), **{"dtype": "float32", "overlap": False, **options})
    with forked_ranks() if forks and config.device == "cpu" else nullcontext():
        started = Ranks(config, [config.device] * size, TIMEOUT_S)
    with started as ranks:
        loaded = load_model(config, ranks.group)
        ranks.await_loaded()
        one = config.device == "cpu" and not divided
        pools = {
            spec.name: shared_pool(spec, num_pages, page_size)
            if one and isinstance(spec, KVGroupSpec)
            else spread_pool(spec, size, num_pages, page_size, config.device)
            for spec in loaded.spec.groups
        }
        ranks.open_pools(pools)
        runner = ModelRunner(loaded, own_part(pools, ranks.group), config, ranks=ranks)
        try:
            yield runner, ranks
        finally:
            runner.close()
            for pool in pools.values():
                pool.close()


def shared_pool(spec: GroupSpec, num_pages: int, page_size: int, device: str = "cpu") -> KVCache:
    """A pool that another process can map."""
    nbytes = KVCache.bytes_needed(spec, num_pages, page_size)
    buffer: PoolBuffer | None = None
    if nbytes:
        on_gpu = device != "cpu"
        buffer = allocate_exported(torch.device(device), nbytes) if on_gpu else allocate_shared(nbytes)
        assert buffer is not None, "this GPU cannot share memory; the log says why"
    return open_pool(spec, num_pages, page_size, torch.device(device), buffer)


def spread_pool(
    spec: GroupSpec, parts: int, num_pages: int, page_size: int, device: str = "cpu"
) -> SpreadKVCache:
    own = rank_spec(spec, parts)
    return pool_of_parts(spec, [shared_pool(own, num_pages, page_size, device) for _ in range(parts)])


def pool_in(parts: int, spec: GroupSpec, num_pages: int, page_size: int, device: str = "cpu") -> KVCache:
    """A pool in one memory, or in as many as there are parts."""
    if parts == 1:
        return shared_pool(spec, num_pages, page_size, device)
    return spread_pool(spec, parts, num_pages, page_size, device)


def put_pages(pool: KVCache, ids: torch.Tensor, pages: torch.Tensor) -> None:
    """Write whole pages, uint8 `[n, page_bytes]`."""
    if isinstance(pool, SpreadKVCache):
        pool.write(ids, pages)
    else:
        pool.bytes[ids] = pages


def memories(pool: KVCache) -> list[torch.Tensor]:
    """The bytes of each part."""
    return [part.bytes for part in (pool.parts if isinstance(pool, SpreadKVCache) else [pool])]
