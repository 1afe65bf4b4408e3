"""Block-sparse attention (MiniMax-M3): each group of query heads attends to the blocks of a context that a
head of an indexer chooses for it (engine/block_choice.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from engine.block_choice import AttendsBlocks, BlockChoice, BlockInputs
from engine.paged_layers import PagedLayers


class BlockIndexer(nn.Module):
    """Replaces the indexer of a layer. It keeps the projections and norms."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.q_proj = indexer.q_proj
        self.k_proj = indexer.k_proj
        self.q_norm = indexer.q_norm
        self.k_norm = indexer.k_norm
        self._dim: int = indexer.head_dim

    def forward(self, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> BlockInputs:
        """hidden_states [1, T, hidden]."""
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self._dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states))[:, None]  # [1, 1, T, dim]
        cos, sin = (part[..., : self._dim] for part in angles)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return BlockInputs(q[0].transpose(0, 1), k[0, 0])


class BlockSparseAttention(nn.Module):
    """Replaces the attention of a layer that has an indexer. It keeps the projections and norms."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.q_proj = attention.q_proj
        self.k_proj = attention.k_proj
        self.v_proj = attention.v_proj
        self.o_proj = attention.o_proj
        self.q_norm = attention.q_norm
        self.k_norm = attention.k_norm
        self.indexer = BlockIndexer(attention.indexer)
        indexer = attention.indexer
        self.blocks = BlockChoice(
            indexer.num_heads, indexer.block_size, indexer.topk_blocks, indexer.local_blocks
        )
        self._dim: int = attention.head_dim

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedLayers,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden] -> the same shape, as in the replaced module."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (project(hidden_states).unflatten(-1, (-1, self._dim)) for project in projections)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        backend, place = paged.of_layer[self.layer_idx]
        assert isinstance(backend, AttendsBlocks)
        heads = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0]
        q, k, v = (paged.filled_up(self.layer_idx, x) for x in heads)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        backend.attend_blocks(place, q, k, v, out, self.indexer(hidden_states, position_embeddings))
        result: torch.Tensor = self.o_proj(out[None, ..., : self._dim].flatten(2))
        return result, None
