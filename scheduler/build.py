"""From WorkerOptions to the parts of a worker: engine, memory, scheduler, publisher."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from engine.batch import Engine
from engine.config import EngineConfig
from engine.fake import FakeEngine, FakeTiming, fake_spec
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.spec import ModelSpec
from kvcache.config import CacheConfig, KVEventsConfig
from kvcache.layout import pages_in
from kvcache.memory import Memory, build_memory
from kvcache.pool import MHAKVCache
from kvcache.publisher import EventPublisher
from scheduler.config import Phase, SchedulerConfig
from scheduler.options import WorkerOptions
from scheduler.policy import NodePolicy
from scheduler.scheduler import Scheduler
from wire.errors import ConfigError
from wire.security import Curve

log = logging.getLogger(__name__)

_FAKE_POOL_TOKENS = 1 << 16


def build_engine(options: WorkerOptions, shared_pool: bool) -> tuple[Engine, Memory]:
    """Load the model and allocate its pools. Raises ConfigError for what cannot work.

    `shared_pool`: pages live in memory that another process on this host can map, and rows are kept for
    requests whose KV is still arriving.
    """
    overlap = bool(options.overlap_depth)
    if options.engine == "fake":
        spec = fake_spec(max_position=_FAKE_POOL_TOKENS)
        memory = build_memory(_cache_config(options, spec, shared_pool, "cpu"), spec.groups)
        return FakeEngine(spec, _pool(memory), FakeTiming(options.fake_step_s), overlap), memory
    device = _device(options)
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        device=device,
        attention=options.attention_backend,
        linear=options.linear_backend,
        threads=options.threads or max(1, (os.cpu_count() or 2) // 2),
        overlap=overlap,
    )
    loaded = load_model(config)
    memory = build_memory(_cache_config(options, loaded.spec, shared_pool, device), loaded.spec.groups)
    return ModelRunner(loaded, memory.kv_caches, config), memory


def build_scheduler(
    options: WorkerOptions, memory: Memory, engine: Engine, policy: NodePolicy, phases: frozenset[Phase]
) -> Scheduler:
    """The scheduler over an engine and its memory."""
    config = SchedulerConfig(
        model=options.model_name,
        max_running_requests=options.max_running_requests,
        chunked_prefill_size=options.chunked_prefill_size,
        max_prefill_tokens=options.max_prefill_tokens,
        last_chunk_tokens=options.last_chunk_tokens,
        decode_reserve_tokens=options.decode_reserve_tokens,
        overlap_depth=options.overlap_depth,
        phases=phases,
    )
    return Scheduler(memory, engine, policy, config)


def open_publisher(options: WorkerOptions, memory: Memory, curve: Curve | None) -> EventPublisher | None:
    """Publish what the cache stores and removes; None when events are off."""
    if not options.kv_events_config.enable or options.prefix_cache == "none":
        return None
    return EventPublisher(memory.config.events, curve)


def _pool(memory: Memory) -> MHAKVCache:
    pool = memory.kv_cache
    assert isinstance(pool, MHAKVCache)
    return pool


def _device(options: WorkerOptions) -> str:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "this machine has no CUDA device", "use cpu or auto")
    if options.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return options.device


def _cache_config(options: WorkerOptions, spec: ModelSpec, shared_pool: bool, device: str) -> CacheConfig:
    total = options.max_total_tokens or _affordable_tokens(options, spec, device)
    wanted = options.max_context_tokens or min(
        spec.max_position, total // options.page_size * options.page_size
    )
    if wanted > spec.max_position:
        raise ConfigError(
            "max_context_tokens",
            f"{wanted} is more than the model's {spec.max_position} positions",
            f"use at most {spec.max_position}",
        )
    return CacheConfig(
        total_tokens=total,
        max_context_len=wanted,
        max_running_requests=options.max_running_requests,
        page_size=options.page_size,
        pre_alloc_size=2 * options.max_running_requests if shared_pool else 0,
        device=device,
        shared=shared_pool and device == "cpu",
        prefix_cache=options.prefix_cache,
        eviction_policy=options.eviction_policy,
        need_sort=True,
        events=KVEventsConfig(
            enable=options.kv_events_config.enable,
            topic=options.kv_events_config.topic,
            interface=options.interface,
            buffer_batches=options.kv_events_config.buffer_batches,
        ),
    )


def _affordable_tokens(options: WorkerOptions, spec: ModelSpec, device: str) -> int:
    """Tokens of KV in `kv_memory_fraction` of what is free now, but no more than all requests can use."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else _available_memory()
    pages = pages_in(int(free * options.kv_memory_fraction), spec.groups, options.page_size)
    tokens = min(pages * options.page_size, options.max_running_requests * spec.max_position)
    if tokens < options.page_size:
        raise ConfigError("kv_memory_fraction", "not even one page of KV fits", "raise it")
    log.info("KV capacity: %d tokens", tokens)
    return tokens


def _available_memory() -> int:
    """Bytes that can be allocated without swapping, as Linux estimates."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("max_total_tokens", "free memory is unknown on this system", "set it")
