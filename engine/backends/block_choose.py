"""Chooses the backend of block-sparse attention, once at load."""

from __future__ import annotations

from engine.backends.block_limits import check_block_scores, check_blocks
from engine.backends.block_reference import TorchBlockAttention
from engine.backends.flashinfer_limits import check_heads
from engine.backends.pick import pick
from engine.block_choice import BlockChoice
from engine.config import EngineConfig
from engine.paged_layers import AttentionBackend
from kvcache.indexed_pool import IndexedKVCache


def build_blocks(
    config: EngineConfig, pool: IndexedKVCache, query_heads: int, scale: float, choice: BlockChoice
) -> AttentionBackend:
    """The backend that `config.attention` names, as build_attention() of choose.py takes it."""

    def cpu() -> AttentionBackend:
        from engine.backends.block_cpu import CpuBlockAttention

        return CpuBlockAttention(pool, query_heads, scale, choice)

    def flashinfer() -> AttentionBackend:
        from engine.backends.block_flashinfer import FlashInferBlockAttention

        check_heads(pool, sinks=False)
        check_blocks(pool, choice)
        check_block_scores(pool)
        return FlashInferBlockAttention(pool, query_heads, scale, choice)

    return pick(config, lambda: TorchBlockAttention(pool, query_heads, scale, choice), cpu, flashinfer)
