"""Chooses the latent attention backend of a model, once at load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.backends.flashinfer_limits import check_index, check_latents
from engine.backends.latent_flashinfer import FlashInferLatentAttention
from engine.backends.latent_reference import TorchLatentAttention
from engine.backends.pick import pick
from engine.backends.sparse_flashinfer import FlashInferSparseAttention
from engine.backends.sparse_reference import TorchSparseAttention

if TYPE_CHECKING:
    from engine.attention_layers import AttentionLayer
    from engine.config import EngineConfig
    from engine.paged_layers import LatentBackend
    from engine.token_choice import TokenChoice
    from kvcache.pool import MLAKVCache


def build_latent(
    config: EngineConfig, pool: MLAKVCache, attention: Sequence[AttentionLayer]
) -> LatentBackend:
    """The backend that `config.attention` names. "auto" takes the fastest one that the device has.

    If the backend cannot run, "auto" takes plain torch and logs the reason; for a backend given by name,
    ConfigError is raised.
    """
    [(heads, scale, choice, sinks)] = {
        (layer.query_heads, layer.scale, layer.choice, layer.sinks) for layer in attention
    }
    if choice is None:
        return _whole(config, pool, heads, scale, sinks)
    return _sparse(config, pool, heads, scale, choice, sinks)


def _whole(config: EngineConfig, pool: MLAKVCache, heads: int, scale: float, sinks: bool) -> LatentBackend:
    """Of attention to whole contexts."""

    def cpu() -> LatentBackend:
        from engine.cpu.mla import CpuLatentAttention

        return CpuLatentAttention(pool, heads, scale)

    def flashinfer() -> LatentBackend:
        check_latents(pool, heads)
        return FlashInferLatentAttention(pool, heads, scale, has_sinks=sinks)

    return pick(config, lambda: TorchLatentAttention(pool, heads, scale), cpu, flashinfer)


def _sparse(
    config: EngineConfig, pool: MLAKVCache, heads: int, scale: float, choice: TokenChoice, sinks: bool
) -> LatentBackend:
    """Of attention to some tokens of each context."""

    def cpu() -> LatentBackend:
        from engine.backends.sparse_cpu import CpuSparseAttention

        return CpuSparseAttention(pool, heads, scale, choice)

    def flashinfer() -> LatentBackend:
        check_latents(pool, heads)
        check_index(pool, choice)
        return FlashInferSparseAttention(pool, heads, scale, choice, has_sinks=sinks)

    return pick(config, lambda: TorchSparseAttention(pool, heads, scale, choice), cpu, flashinfer)
