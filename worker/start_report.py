"""What a worker computes with, in one line for operators."""

from __future__ import annotations

import torch

from common.start_log import gigabytes
from engine.config import EngineConfig
from engine.cpu.op import KernelsUnavailable, current_isa
from engine.runner import ModelRunner
from kvcache.memory import Memory


def start_report(config: EngineConfig, runner: ModelRunner, memory: Memory) -> str:
    """Device, instruction set, dtypes, attention backends, ranks, threads, KV capacity."""
    weights = str(runner.spec.dtype).removeprefix("torch.")
    parts = [
        _device(config),
        f"{weights} weights{_format(config, runner)}",
        f"attention by {', '.join(runner.attention.backend_names) or 'no backend'}",
    ]
    if runner.rank_count > 1:
        parts.append(f"ranks: {runner.rank_count}")
    if torch.device(config.device).type == "cpu":
        parts.append(f"threads: {torch.get_num_threads() * runner.rank_count}")
    sizes = memory.config
    nbytes = sum(pool.nbytes for pool in memory.kv_caches.values())
    per_token = (
        sum(pool.num_pages * pool.page_bytes for pool in memory.kv_caches.values()) / sizes.total_tokens
    )
    kept = "as weights" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    parts.append(
        f"KV for {sizes.total_tokens:,} tokens in {gigabytes(nbytes)} ({kept}; pages of {sizes.page_size}, "
        f"{per_token:,.0f} bytes a token, {sizes.max_context_len:,} tokens a request at most)"
    )
    if memory.tiers is not None:
        arenas = memory.tiers.host.pool.arenas
        tokens = arenas[memory.specs[0].name].num_pages * memory.page_size
        host_bytes = sum(arena.bytes.nbytes for arena in arenas.values())
        parts.append(f"host tier for {tokens:,} tokens in {gigabytes(host_bytes)}")
    return "; ".join(parts)


def _device(config: EngineConfig) -> str:
    device = torch.device(config.device)
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    try:
        return f"{device} ({current_isa()} kernels)"
    except KernelsUnavailable as error:
        return f"{device} (no kernels: {error})"


def _format(config: EngineConfig, runner: ModelRunner) -> str:
    if config.weight_dtype == "int8":
        return " as int8"
    return f" ({', '.join(runner.kept_formats)} as stored)" if runner.kept_formats else ""
