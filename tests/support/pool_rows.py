"""Keys and values of a pool by slot, read back for comparison."""

from __future__ import annotations

import torch

from kvcache.pool import MHAKVCache


def read_kv(pool: MHAKVCache, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`k`, `v` `[tokens, head, head_dim]` of model layer `layer` at `slots`, copied."""
    tiles = pool.read_pages(pool.spec.layer_ids.index(layer), slots // pool.page_size)
    rows = tiles[torch.arange(len(slots)), :, :, slots % pool.page_size]
    return rows[:, 0], rows[:, 1]
