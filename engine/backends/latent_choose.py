"""Which latent attention backend runs, decided once at load."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.backends.latent_flashinfer import WIDTHS, FlashInferLatentAttention
from engine.backends.latent_twin import TorchLatentAttention
from kvcache.quant import KVFormat
from wire.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.latent import LatentBackend
    from engine.loader import AttentionLayer
    from kvcache.pool import MLAKVCache

log = logging.getLogger(__name__)


def build_latent(
    config: EngineConfig, pool: MLAKVCache, attention: Sequence[AttentionLayer]
) -> LatentBackend:
    """The backend that `config.attention` names, for layers that are all alike; "auto" takes the fastest.

    Raises ConfigError when a backend that was named cannot run. "auto" then takes plain torch and logs why.
    """
    [(heads, scale)] = {(layer.query_heads, layer.scale) for layer in attention}  # one class of module
    on_cpu = torch.device(config.device).type == "cpu"
    wanted = config.attention
    if wanted == "auto":
        wanted = "cpu" if on_cpu else "flashinfer"
    if wanted == "torch":
        return TorchLatentAttention(pool, heads, scale)
    if on_cpu != (wanted == "cpu"):
        problem = f"{wanted!r} does not run on device {config.device}"
        raise ConfigError("engine.attention", problem, "use auto or torch")
    problem, backend = _cpu(pool, heads, scale) if on_cpu else _flashinfer(pool, heads, scale)
    if backend is not None:
        return backend
    if config.attention != "auto":
        raise ConfigError("engine.attention", f"{wanted!r} cannot run: {problem}", "use auto or torch")
    log.warning("attention: %s cannot run (%s); plain torch attends instead, more slowly", wanted, problem)
    return TorchLatentAttention(pool, heads, scale)


def _cpu(pool: MLAKVCache, heads: int, scale: float) -> tuple[str, LatentBackend | None]:
    from engine.cpu.mla import CpuLatentAttention
    from engine.cpu.op import KernelsUnavailable

    try:
        return "", CpuLatentAttention(pool, heads, scale)
    except KernelsUnavailable as error:
        return str(error), None


def _flashinfer(pool: MLAKVCache, heads: int, scale: float) -> tuple[str, LatentBackend | None]:
    widths = (pool.spec.kv_lora_rank, pool.spec.rope_dim)
    if pool.spec.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer attends in float16 and bfloat16, not {pool.spec.dtype}", None
    if pool.spec.stored is not KVFormat.AUTO:
        return f"FlashInfer reads no {pool.spec.stored} latents", None
    if widths != WIDTHS:
        return f"FlashInfer attends to latents of {WIDTHS[0]} + {WIDTHS[1]} values, not {widths}", None
    try:
        return "", FlashInferLatentAttention(pool, heads, scale)
    except ImportError as error:
        return str(error), None
