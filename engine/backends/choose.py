"""Which attention backend runs, decided once at load."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from engine.attention import AttentionBackend, PagedLayers
from engine.backends.latent_choose import build_latent
from engine.backends.torch_twin import TorchAttention
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.latent import LatentBackend
from engine.loader import LoadedModel
from kvcache.pool import KVCache, MHAKVCache, MLAKVCache
from kvcache.quant import KVFormat
from wire.errors import ConfigError

log = logging.getLogger(__name__)


def build_layers(config: EngineConfig, loaded: LoadedModel, pools: Mapping[str, KVCache]) -> PagedLayers:
    """A backend for each group that holds keys and values. Raises ConfigError as build_attention does."""
    built: dict[str, AttentionBackend] = {}
    latent: LatentBackend | None = None
    for group in loaded.spec.groups:
        pool = pools[group.name]
        if isinstance(pool, MLAKVCache):
            latent = build_latent(config, pool, loaded.attention)
        if isinstance(pool, MHAKVCache) and group.layer_ids:
            layers = [facts for facts in loaded.attention if facts.layer in group.layer_ids]
            scales, heads = {facts.scale for facts in layers}, {facts.query_heads for facts in layers}
            if len(scales) != 1 or len(heads) != 1:
                raise UnsupportedModel(
                    f"its {group.kind} layers scale attention differently ({scales})", "use a plain decoder"
                )
            sinks = any(facts.sinks for facts in layers)
            built[group.kind] = build_attention(config, pool, heads.pop(), scales.pop(), sinks)
    return PagedLayers(built.get("full"), built.get("window"), loaded.spec.groups, latent)


def build_attention(
    config: EngineConfig, pool: MHAKVCache, query_heads: int, scale: float, sinks: bool = False
) -> AttentionBackend:
    """The backend that `config.attention` names; "auto" takes the fastest that the device has.

    `sinks`: whether its layers have attention sinks.
    Raises ConfigError when a backend that was named cannot run. "auto" then takes plain torch and logs why.
    """
    on_cpu = torch.device(config.device).type == "cpu"
    wanted = config.attention
    if wanted == "auto":
        wanted = "cpu" if on_cpu else "flashinfer"
    if wanted == "torch":
        return TorchAttention(pool, query_heads, scale)
    if on_cpu != (wanted == "cpu"):
        problem = f"{wanted!r} does not run on device {config.device}"
        raise ConfigError("engine.attention", problem, "use auto or torch")
    problem, backend = (
        _cpu(pool, query_heads, scale) if on_cpu else _flashinfer(pool, query_heads, scale, sinks)
    )
    if backend is not None:
        return backend
    if config.attention != "auto":
        raise ConfigError("engine.attention", f"{wanted!r} cannot run: {problem}", "use auto or torch")
    log.warning("attention: %s cannot run (%s); plain torch attends instead, more slowly", wanted, problem)
    return TorchAttention(pool, query_heads, scale)


def _cpu(pool: MHAKVCache, query_heads: int, scale: float) -> tuple[str, AttentionBackend | None]:
    from engine.cpu.attention import CpuAttention
    from engine.cpu.op import KernelsUnavailable

    try:
        return "", CpuAttention(pool, query_heads, scale)
    except KernelsUnavailable as error:
        return str(error), None


def _flashinfer(
    pool: MHAKVCache, query_heads: int, scale: float, sinks: bool
) -> tuple[str, AttentionBackend | None]:
    from engine.backends.flashinfer import FlashInferAttention

    if pool.spec.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer attends in float16 and bfloat16, not {pool.spec.dtype}", None
    if pool.spec.stored is KVFormat.FP4_E2M1 or (sinks and pool.spec.stored is not KVFormat.AUTO):
        return f"FlashInfer reads no {pool.spec.stored} pages{' with sinks' if sinks else ''}", None
    try:
        return "", FlashInferAttention(pool, query_heads, scale, sinks)
    except ImportError as error:
        return str(error), None
