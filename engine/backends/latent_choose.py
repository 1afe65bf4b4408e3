"""Chooses the latent attention backend of a model, once at load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.backends.latent_flashinfer import WIDTHS, FlashInferLatentAttention
from engine.backends.latent_reference import TorchLatentAttention
from engine.backends.pick import BackendUnavailable, pick
from kvcache.quant import KVFormat

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.loader import AttentionLayer
    from engine.paged_layers import LatentBackend
    from kvcache.pool import MLAKVCache


def build_latent(
    config: EngineConfig, pool: MLAKVCache, attention: Sequence[AttentionLayer]
) -> LatentBackend:
    """The backend that `config.attention` names. "auto" takes the fastest one that the device has.

    If the backend cannot run, "auto" takes plain torch and logs the reason; for a backend given by name,
    ConfigError is raised.
    """
    [(heads, scale)] = {(layer.query_heads, layer.scale) for layer in attention}  # equal in all layers

    def cpu() -> LatentBackend:
        from engine.cpu.mla import CpuLatentAttention

        return CpuLatentAttention(pool, heads, scale)

    def flashinfer() -> LatentBackend:
        widths = (pool.spec.kv_lora_rank, pool.spec.rope_dim)
        if pool.spec.dtype not in (torch.float16, torch.bfloat16):
            problem = f"FlashInfer attends in float16 and bfloat16, not {pool.spec.dtype}"
            raise BackendUnavailable(problem)
        if pool.spec.stored is not KVFormat.AUTO:
            raise BackendUnavailable(f"FlashInfer does not read {pool.spec.stored} latents")
        if widths != WIDTHS:
            problem = f"FlashInfer attends to latents of {WIDTHS[0]} + {WIDTHS[1]} values, not {widths}"
            raise BackendUnavailable(problem)
        return FlashInferLatentAttention(pool, heads, scale)

    return pick(config, lambda: TorchLatentAttention(pool, heads, scale), cpu, flashinfer)
