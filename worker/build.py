"""From WorkerOptions to the parts of a worker: engine, memory, scheduler, publisher."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from threading import TIMEOUT_MAX

from common.errors import ConfigError
from common.start_log import start_log
from engine.batch import Engine
from engine.config import EngineConfig
from engine.fake import FakeEngine, FakeTiming, fake_spec
from engine.model_digest import model_digest
from engine.model_ranks import ModelRanks, rank_devices
from engine.runner import ModelRunner
from kvcache.config import CacheConfig
from kvcache.memory import Memory, build_memory
from kvcache.publisher import EventPublisher
from scheduler.config import Phase, SchedulerConfig
from scheduler.node_policy import NodePolicy
from scheduler.scheduler import Scheduler
from wire.security import Curve
from worker.capacity import cache_config, chosen_config, host_budget, host_free
from worker.device import choose_device
from worker.gpu_build import build_on_gpu
from worker.options import WorkerOptions
from worker.start_report import start_report

_FAKE_POOL_TOKENS = 1 << 16


def build_engine(options: WorkerOptions, reserves: bool) -> tuple[Engine, Memory]:
    """Load the model and allocate its pools. Raises ConfigError for what cannot work.

    Pages live in memory that another process on this host can map. `reserves`: rows are kept for requests
    whose KV is still arriving.
    """
    overlap = bool(overlap_depth(options))
    if options.engine == "fake":
        if options.tp_size > 1:
            raise ConfigError("tp_size", f"it is {options.tp_size}, and the engine is fake", "use 1")
        spec = fake_spec(max_position=_FAKE_POOL_TOKENS, groups=options.fake_groups)
        chosen = _named(chosen_config(options, reserves, "cpu"), lambda: _fake_digest(options))
        sizes = cache_config(options, spec, chosen, host_budget(options), host_free(options))
        memory = build_memory(sizes, spec.groups)
        return FakeEngine(spec, memory.kv_caches, FakeTiming(options.fake_step_s), overlap), memory
    config = EngineConfig(
        model=options.model,
        generation_config=options.generation_config,
        dtype=options.dtype,
        weight_dtype=options.weight_dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        device=str(choose_device(options.device)),
        attention=options.attention_backend,
        linear=options.linear_backend,
        threads=max(1, (options.threads or (os.cpu_count() or 2) // 2) // options.tp_size),
        overlap=overlap,
    )
    chosen = _named(chosen_config(options, reserves, config.device), lambda: model_digest(config))
    build = _build_on_cpu if config.device == "cpu" else build_on_gpu
    runner, memory = build(options, config, chosen)
    start_log.info(start_report(config, runner, memory))
    return runner, memory


def _build_on_cpu(
    options: WorkerOptions, config: EngineConfig, chosen: CacheConfig
) -> tuple[ModelRunner, Memory]:
    devices = rank_devices(config.device, options.tp_size)
    if len(devices) > 1:
        chosen = replace(chosen, rank_devices=tuple(devices))
    with ExitStack() as opened:
        model = ModelRanks(config, devices, options.first_forward_s)
        opened.callback(model.close)
        sizes = cache_config(options, model.loaded.spec, chosen, host_budget(options), host_free(options))
        memory = opened.enter_context(build_memory(sizes, model.loaded.spec.groups))
        runner = model.open(memory.kv_caches)
        opened.pop_all()
    return runner, memory


def _named(chosen: CacheConfig, digest: Callable[[], bytes]) -> CacheConfig:
    """The configuration with the model's digest, where there is a storage tier: to read all files takes
    long."""
    if chosen.tiers.storage is None:
        return chosen
    return replace(chosen, tiers=replace(chosen.tiers, model_digest=digest()))


def _fake_digest(options: WorkerOptions) -> bytes:
    return hashlib.sha256(f"fake {options.model} {options.fake_groups}".encode()).digest()


def overlap_depth(options: WorkerOptions) -> int:
    """The steps that are launched before a result is known. On a CPU the forward wants the cores itself."""
    if options.overlap_depth is not None:
        return options.overlap_depth
    return int(options.engine != "fake" and choose_device(options.device).type == "cuda")


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
        overlap_depth=overlap_depth(options),
        phases=phases,
        result_timeout_s=min(options.first_forward_s, TIMEOUT_MAX),
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
    public, private = memory.snapshot()
    most = memory.config.events.buffer_batches
    for batch in public.batches(most) if public.nodes else ():
        publisher.publish(batch)
    for batch in private.batches(most) if private.nodes else ():
        publisher.publish((), batch)
    return publisher
