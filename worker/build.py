"""From WorkerOptions to the parts of a worker: engine, memory, scheduler, publisher."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.batch import Engine
from engine.config import EngineConfig
from engine.fake import FakeEngine, FakeTiming, fake_spec
from engine.graphs import DecodeLimits
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.spec import ModelSpec
from kvcache.config import MIN_STATE_SLOTS, CacheConfig, KVEventsConfig
from kvcache.layout import pages_in
from kvcache.memory import Memory, build_memory
from kvcache.publisher import EventPublisher
from scheduler.config import Phase, SchedulerConfig
from scheduler.node_policy import NodePolicy
from scheduler.scheduler import Scheduler
from wire.security import Curve
from worker.device import choose_device
from worker.options import WorkerOptions

log = logging.getLogger(__name__)

_FAKE_POOL_TOKENS = 1 << 16


def build_engine(options: WorkerOptions, shared_pool: bool) -> tuple[Engine, Memory]:
    """Load the model and allocate its pools. Raises ConfigError for what cannot work.

    `shared_pool`: pages live in memory that another process on this host can map, and rows are kept for
    requests whose KV is still arriving.
    """
    overlap = bool(options.overlap_depth)
    if options.engine == "fake":
        spec = fake_spec(max_position=_FAKE_POOL_TOKENS, groups=options.fake_groups)
        memory = build_memory(_cache_config(options, spec, shared_pool, "cpu"), spec.groups)
        return FakeEngine(spec, memory.kv_caches, FakeTiming(options.fake_step_s), overlap), memory
    device = str(choose_device(options.device))
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
    runner = ModelRunner(loaded, memory.kv_caches, config)
    if device != "cpu":
        runner.record_decode(_decode_limits(memory))
    return runner, memory


def _decode_limits(memory: Memory) -> DecodeLimits:
    """The largest decode step that the scheduler can build over this memory."""
    return DecodeLimits(
        sequences=memory.config.max_running_requests,
        context_pages=-(-memory.config.max_context_len // memory.page_size),
        rows=memory.req_to_token_pool.size,
    )


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


def open_publisher(
    options: WorkerOptions, memory: Memory, curve: Curve | None, on_snapshot_wanted: Callable[[], None]
) -> EventPublisher | None:
    """The publisher of what the cache stores and removes; None when events are off. What is cached already is
    published first."""
    if not options.kv_events_config.enable or options.prefix_cache == "none":
        return None
    publisher = EventPublisher(memory.config.events, curve, on_snapshot_wanted)
    memory.take_events()  # they are in the snapshot
    snapshot = memory.snapshot()
    if snapshot.nodes:
        for batch in snapshot.batches(memory.config.events.buffer_batches):
            publisher.publish(batch)
    return publisher


def _cache_config(options: WorkerOptions, spec: ModelSpec, shared_pool: bool, device: str) -> CacheConfig:
    """The memory's configuration, with sizes that the options leave open taken from the machine and model."""
    config = _chosen(options, shared_pool, device)
    config = replace(config, state_slots=_state_slots(config, spec, options.kv_memory_fraction))
    total = options.max_total_tokens or _affordable_tokens(config, spec, options.kv_memory_fraction)
    return replace(config, total_tokens=total, max_context_len=_context_tokens(options, spec, total))


def _chosen(options: WorkerOptions, shared_pool: bool, device: str) -> CacheConfig:
    """What the options say, for a pool of one page."""
    chunk = options.chunked_prefill_size
    return CacheConfig(
        total_tokens=options.page_size,
        max_context_len=1,
        max_running_requests=options.max_running_requests,
        page_size=options.page_size,
        pre_alloc_size=2 * options.max_running_requests if shared_pool else 0,
        device=device,
        shared=shared_pool and device == "cpu",
        prefix_cache=options.prefix_cache,
        eviction_policy=options.eviction_policy,
        need_sort=True,
        swa_full_tokens_ratio=options.swa_full_tokens_ratio,
        max_chunk_tokens=chunk and max(min(chunk, options.max_prefill_tokens), options.page_size),
        state_slots=options.max_mamba_cache_size,
        mamba_track_interval=options.mamba_track_interval,
        events=_events_config(options),
    )


def _events_config(options: WorkerOptions) -> KVEventsConfig:
    events = options.kv_events_config
    return KVEventsConfig(
        enable=events.enable,
        topic=events.topic,
        interface=options.interface,
        ports=options.ports.of("events"),
        buffer_batches=events.buffer_batches,
    )


def _context_tokens(options: WorkerOptions, spec: ModelSpec, total_tokens: int) -> int:
    """The longest prompt + output: as wanted, else as long as the model and the pool allow."""
    whole_pages = total_tokens // options.page_size * options.page_size
    wanted = options.max_context_tokens or min(spec.max_position, whole_pages)
    if wanted > spec.max_position:
        raise ConfigError(
            "max_context_tokens",
            f"{wanted} is more than the model's {spec.max_position} positions",
            f"use at most {spec.max_position}",
        )
    return wanted


def _state_slots(config: CacheConfig, spec: ModelSpec, fraction: float) -> int:
    """Slots of a state group: as many as the requests can use, in at most half of the memory for KV."""
    sizes = [group.page_bytes(config.page_size) for group in spec.groups if group.kind == "state"]
    if config.state_slots is not None or not sizes:
        return config.num_state_slots
    affordable = int(_free_memory(config.device) * fraction / 2) // sizes[0]
    slots = max(MIN_STATE_SLOTS, min(config.num_state_slots, affordable))
    log.info("state capacity: %d slots of %d bytes", slots, sizes[0])
    return slots


def _affordable_tokens(config: CacheConfig, spec: ModelSpec, fraction: float) -> int:
    """Tokens whose KV of all groups fits into that share of the free memory; at most what all requests can
    use."""
    page_size = config.page_size
    budget = int(_free_memory(config.device) * fraction)
    pages = pages_in(budget, spec.groups, page_size, config.swa_full_tokens_ratio, config.num_state_slots)
    tokens = min(pages * page_size, config.max_running_requests * spec.max_position)
    if tokens < page_size:
        raise ConfigError("kv_memory_fraction", "not even one page of KV fits", "raise it")
    log.info("KV capacity: %d tokens", tokens)
    return tokens


def _free_memory(device: str) -> int:
    """Bytes that can be allocated now; on the host, Linux's estimate of what needs no swapping."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("max_total_tokens", "free memory is unknown on this system", "set it")
