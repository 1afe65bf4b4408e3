"""How much a worker's memory holds: what the options say; what they leave open, from machine and model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from common.errors import ConfigError
from common.memory import available_memory
from engine.spec import ModelSpec
from kvcache.config import MIN_STATE_SLOTS, CacheConfig, KVEventsConfig
from kvcache.layout import GroupSpec, pages_in, rank_spec
from kvcache.storage.config import StorageConfig
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers.config import TierConfig
from worker.options import WorkerOptions

log = logging.getLogger(__name__)


Budget = Callable[[], int]
"""Gives the bytes that pools may take, of each rank. It is asked only if the options leave a size open."""


def cache_config(
    options: WorkerOptions, spec: ModelSpec, chosen: CacheConfig, budget: Budget, free: Budget
) -> CacheConfig:
    """`chosen` with all sizes. `free` gives the bytes that there are now, of each rank. Raises ConfigError if
    not even a page fits into the budget, or if the tokens that the options say need more than is free."""
    config = replace(chosen, state_slots=_state_slots(chosen, spec, budget))
    if options.max_total_tokens is None:
        total = _affordable_tokens(config, spec, budget())
    else:
        total = options.max_total_tokens
        _check_fits(config, spec, total, free())
    return replace(config, total_tokens=total, max_context_len=_context_tokens(options, spec, total))


def host_budget(options: WorkerOptions) -> Budget:
    """A share of the memory that this process could take when it is asked: of the host, or its container."""
    return lambda: int(host_free(options)() * options.kv_memory_fraction)


def host_free(options: WorkerOptions) -> Budget:
    """All of that memory."""
    return lambda: available_memory() // options.tp_size


def chosen_config(options: WorkerOptions, reserves: bool, device: str) -> CacheConfig:
    """What the options say, for a pool of one page; `device` is a torch device."""
    chunk = options.chunked_prefill_size
    return CacheConfig(
        total_tokens=options.page_size,
        max_context_len=1,
        max_running_requests=options.max_running_requests,
        page_size=options.page_size,
        pre_alloc_size=2 * options.max_running_requests if reserves else 0,
        device=device,
        shared=device == "cpu" or options.kv_transfer_backend in ("auto", "cuda_ipc"),
        prefix_cache=options.prefix_cache,
        eviction_policy=options.eviction_policy,
        need_sort=True,
        swa_full_tokens_ratio=options.swa_full_tokens_ratio,
        max_chunk_tokens=chunk and max(min(chunk, options.max_prefill_tokens), options.page_size),
        state_slots=options.max_mamba_cache_size,
        mamba_track_interval=options.mamba_track_interval,
        events=_events_config(options),
        tiers=TierConfig(
            ratio=options.hicache_ratio,
            size_bytes=int(options.hicache_size * 1e9),
            write_policy=options.hicache_write_policy,
            pace_bytes_per_s=options.hicache_write_pace * 1e9,
            decode_offload_tokens=options.hicache_decode_offload_tokens,
            storage=_storage_config(options),
            prefetch_policy=options.hicache_storage_prefetch_policy,
            prefetch_threshold=options.hicache_storage_prefetch_threshold,
            prefetch_if_slower=options.hicache_storage_prefetch_if_slower,
        ),
        tenancy=TenancyConfig(options.sharing_min_tenants, options.sharing_epoch_s, options.sharing_burst),
        shares=options.shares(),
    )


def _storage_config(options: WorkerOptions) -> StorageConfig | None:
    if not options.hicache_storage_backend:
        return None
    return StorageConfig(
        backend=options.hicache_storage_backend,
        path=options.hicache_storage_path,
        url=options.hicache_storage_url,
        max_bytes=int(options.hicache_storage_size * 1e9),
        fsync=options.hicache_storage_fsync,
        direct_io=options.hicache_storage_direct_io,
        secret=options.secret(),
        extra=options.hicache_storage_backend_extra_config,
    )


def _events_config(options: WorkerOptions) -> KVEventsConfig:
    events = options.kv_events_config
    return KVEventsConfig(
        enable=events.enable,
        topic=events.topic,
        interface=options.interface,
        ports=options.ports.of("events"),
        buffer_batches=events.buffer_batches,
        buffer_bytes=events.buffer_bytes,
        secret=options.secret(),
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


def _state_slots(config: CacheConfig, spec: ModelSpec, budget: Budget) -> int:
    """Slots of a state group: as many as the requests can use, in at most half of the budget."""
    sizes = [group.page_bytes(config.page_size) for group in spec.groups if group.kind == "state"]
    if config.state_slots is not None or not sizes:
        return config.num_state_slots
    slots = max(MIN_STATE_SLOTS, min(config.num_state_slots, budget() // 2 // sizes[0]))
    log.info("state capacity: %d slots of %d bytes", slots, sizes[0])
    return slots


def own_groups(spec: ModelSpec, config: CacheConfig) -> tuple[GroupSpec, ...]:
    """What each rank has of the model's groups."""
    return tuple(rank_spec(group, max(1, len(config.rank_devices))) for group in spec.groups)


def _check_fits(config: CacheConfig, spec: ModelSpec, tokens: int, free: int) -> None:
    """Memory of a host is only taken when it is used: the process would be killed later."""
    fit = _tokens_in(config, spec, free)
    if tokens > fit:
        raise ConfigError(
            "max_total_tokens",
            f"{tokens} tokens of KV do not fit into the memory that is free, {free / 1e9:.1f} GB",
            f"use {fit} or fewer" if fit else "use a larger machine",
        )


def _tokens_in(config: CacheConfig, spec: ModelSpec, nbytes: int) -> int:
    """Tokens whose KV of all groups fits into so many bytes of each rank."""
    groups = own_groups(spec, config)
    ratio, slots = config.swa_full_tokens_ratio, config.num_state_slots
    return pages_in(nbytes, groups, config.page_size, ratio, slots) * config.page_size


def _affordable_tokens(config: CacheConfig, spec: ModelSpec, budget: int) -> int:
    """Tokens whose KV of all groups fits into the budget; at most what all requests can use."""
    tokens = min(_tokens_in(config, spec, budget), config.max_running_requests * spec.max_position)
    if tokens < config.page_size:
        key = "kv_memory_fraction" if config.device == "cpu" else "gpu_memory_utilization"
        raise ConfigError(key, "not even one page of KV fits", "raise it")
    log.info("KV capacity: %d tokens", tokens)
    return tokens
