"""Compressed attention (DeepSeek-V4, section 2.3).

A token has one row, which is its key and its value for all heads. Queries attend to the rows of a window of
tokens. In most layers they also attend to entries, each of which sums up some tokens before:

    entry i  =  norm(sum_j softmax(gate_j + bias_j) * kv_j),  rotated at the entry's first token

where j are the tokens that it stands for, 128 of them ("heavily compressed"), or 4 of them and, by other
projections, the 4 before ("compressed sparse"). In layers of the latter kind an indexer has entries of its
own, and a query attends to those that it scores highest, as in DeepSeek-V3.2.

transformers keeps kv_j and gate_j of unfinished entries in a state that grows and is cut. Here they are part
of a token's row in the window group: an entry is made of rows that are in pages anyway, so a prompt may be
cut, cached, sent and resumed at any token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from engine.paged_layers import Compression, IndexQueries, PagedLayers


class WindowCompressor(nn.Module):
    """Makes entries with the weights of one of transformers' compressors, or of an indexer, which has the
    same ones at its own width."""

    def __init__(self, compressor: Any) -> None:
        super().__init__()
        self.kv_proj = compressor.kv_proj
        self.gate_proj = compressor.gate_proj
        self.position_bias = compressor.position_bias  # [tokens, projected]
        self.kv_norm = compressor.kv_norm
        self.dim: int = compressor.head_dim
        self.tokens: int = compressor.compress_rate
        self.overlaps: bool = compressor.position_bias.shape[-1] == 2 * compressor.head_dim
        self._dtype: torch.dtype = compressor.kv_proj.weight.dtype  # float32 beside float16

    @property
    def row_width(self) -> int:
        """Values that it needs of a token."""
        return 2 * int(self.position_bias.shape[-1])

    def projected(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> what tokens' rows keep for entries, [T, row_width]."""
        wanted = hidden_states.to(self._dtype)
        return torch.cat((self.kv_proj(wanted), self.gate_proj(wanted)), dim=-1).to(hidden_states.dtype)

    def entries(self, rows: torch.Tensor, firsts: torch.Tensor, angles: Any) -> torch.Tensor:
        """[E, span, row_width] and the first tokens that the entries stand for, [E], with the cosines and
        sines there -> [E, dim]."""
        kv, gate = rows.chunk(2, dim=-1)
        if self.overlaps:
            kv, gate = self._both_series(kv, gate, firsts)
        else:
            gate = gate + self.position_bias
        weights = gate.softmax(dim=1, dtype=torch.float32).to(kv.dtype)
        summed = self.kv_norm((kv * weights).sum(dim=1))
        rotated: torch.Tensor = apply_rotary_pos_emb(summed[None, None], *angles)
        return rotated[0, 0]

    def _both_series(
        self, kv: torch.Tensor, gate: torch.Tensor, firsts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens before by their first half, the entry's own by the second. There are none before the
        first entry."""
        own, before = slice(self.tokens, None), slice(self.tokens)
        gates = gate.view(len(gate), 2, self.tokens, -1) + self.position_bias
        first_half = gates[:, 0, :, : self.dim].masked_fill((firsts == 0)[:, None, None], -torch.inf)
        return (
            torch.cat((kv[:, before, : self.dim], kv[:, own, self.dim :]), dim=1),
            torch.cat((first_half, gates[:, 1, :, self.dim :]), dim=1),
        )


class EntryIndexer(WindowCompressor):
    """Makes the entries that an indexer scores, and says how its queries score them."""

    def __init__(self, indexer: Any) -> None:
        super().__init__(indexer)
        self.q_b_proj = indexer.q_b_proj
        self.weights_proj = indexer.scorer.weights_proj
        self._weights_dtype: torch.dtype = indexer.scorer.weights_proj.weight.dtype
        self._scale: float = indexer.scorer.softmax_scale * indexer.scorer.weights_scaling

    def queries(self, hidden_states: torch.Tensor, compressed: torch.Tensor, angles: Any) -> IndexQueries:
        """hidden_states [T, hidden]; compressed [T, q_lora_rank], as the queries have it."""
        q = self.q_b_proj(compressed).unflatten(-1, (-1, self.dim)).transpose(0, 1)
        rotated = apply_rotary_pos_emb(q[None], *angles)[0]
        weights = self.weights_proj(hidden_states.to(self._weights_dtype)).float() * self._scale
        return IndexQueries(rotated.transpose(0, 1), weights)


class EntryCompressor(nn.Module):
    """A Compressor (engine/paged_layers.py): of a layer's compressor and, if it has one, its indexer."""

    def __init__(self, compressor: Any, top: int) -> None:
        super().__init__()
        indexer = getattr(compressor, "indexer", None)
        self.rotary_emb = compressor.rotary_emb
        self.own = WindowCompressor(compressor)
        self.indexer = None if indexer is None else EntryIndexer(indexer)
        span = self.own.tokens * (2 if self.own.overlaps else 1)
        self.compression = Compression(self.own.tokens, span, None if indexer is None else top)

    def projected(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, width]."""
        if self.indexer is None:
            return self.own.projected(hidden_states)
        return torch.cat((self.own.projected(hidden_states), self.indexer.projected(hidden_states)), dim=-1)

    def entries(self, rows: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        rows = rows[..., self.own.dim :]  # behind what attention reads
        angles = self.rotary_emb(rows, position_ids=firsts[None], layer_type="compress")
        if self.indexer is None:
            return self.own.entries(rows, firsts, angles)
        own, index = rows[..., : self.own.row_width], rows[..., self.own.row_width :]
        parts = self.own.entries(own, firsts, angles), self.indexer.entries(index, firsts, angles)
        return torch.cat(parts, dim=-1)


class CompressedAttention(nn.Module):
    """Replaces DeepSeek-V4's attention after loading. It keeps the projections."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.sliding_window: int = attention.sliding_window
        self.q_a_proj = attention.q_a_proj
        self.q_a_norm = attention.q_a_norm
        self.q_b_proj = attention.q_b_proj
        self.q_b_norm = attention.q_b_norm
        self.kv_proj = attention.kv_proj
        self.kv_norm = attention.kv_norm
        self.o_a_proj = attention.o_a_proj
        self.o_b_proj = attention.o_b_proj
        self.sinks = attention.sinks
        compressor = attention.compressor
        self.compressor = (
            None if compressor is None else EntryCompressor(compressor, attention.config.index_topk)
        )
        self._dim: int = attention.head_dim
        self._groups: int = attention.config.o_groups
        self._rotation: str = attention.rope_layer_type

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, paged: PagedLayers, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden] -> the same shape, as in the replaced module."""
        cos, sin = angles = position_embeddings[self._rotation]
        compressed = self.q_a_norm(self.q_a_proj(hidden_states))
        q = self.q_b_norm(self.q_b_proj(compressed).unflatten(-1, (-1, self._dim)))[0]  # [T, heads, dim]
        q = apply_rotary_pos_emb(q.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1)
        rows = apply_rotary_pos_emb(self.kv_norm(self.kv_proj(hidden_states))[:, None], cos, sin)[0, 0]
        index = None
        if self.compressor is not None:
            rows = torch.cat((rows, self.compressor.projected(hidden_states[0])), dim=-1)
            if (indexer := self.compressor.indexer) is not None:
                index = indexer.queries(hidden_states[0], compressed[0], angles)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        assert paged.compressed is not None, "the runner has no pools of entries"
        paged.compressed.forward(self.layer_idx, q, rows, out, self.sinks, self.compressor, index)
        # Keys are values, too, so that values are rotated: the query's own rotation is taken back.
        values = apply_rotary_pos_emb(out.transpose(0, 1)[None], cos, -sin)[0].transpose(0, 1)
        grouped = self.o_a_proj(values.reshape(1, len(values), self._groups, -1))
        result: torch.Tensor = self.o_b_proj(grouped.flatten(2))
        return result, None
