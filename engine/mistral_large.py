"""Attention of Mistral Large 4: sparse latent attention, some of whose layers know no positions, or read the
latents of another layer.

Queries grow with the logarithm of their position p, those of each head h by s_h log(p + 1) + b_h, and so do
the indexer's. A layer that reads another's latents may choose tokens itself all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.latent import Indexer, LatentAttention, Rotate, unrotated
from engine.paged_layers import IndexInputs, PagedLayers, SelectsTokens
from engine.token_choice import TokenChoice


class GrowingScale(nn.Module):
    """Replaces what queries are multiplied by. It keeps the numbers of the heads."""

    def __init__(self, scaling: Any) -> None:
        super().__init__()
        self.scale = scaling.scale  # [heads]
        self.bias = scaling.bias

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[1, T] -> [1, heads, T, 1]. It is rounded to `dtype` where transformers does."""
        logarithm = (positions + 1).float().log().to(dtype)[:, None]
        grown: torch.Tensor = self.scale.to(dtype)[:, None] * logarithm + self.bias.to(dtype)[:, None]
        return grown.unsqueeze(-1)


class HiddenIndexer(Indexer):
    """Replaces an indexer whose queries are made of hidden states."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__(indexer, rotate)
        self.q_input_norm = indexer.q_input_norm
        self.growing = GrowingScale(indexer.softmax_scaling)

    def of_hidden(self, hidden_states: torch.Tensor, positions: torch.Tensor, angles: Any) -> IndexInputs:
        """hidden_states [1, T, hidden]."""
        inputs = self.unrotated(hidden_states, self.q_input_norm(hidden_states))
        return self.rotated(inputs._replace(q=inputs.q * self.growing(positions, inputs.q.dtype)), angles)


class MistralLargeAttention(LatentAttention):
    """Replaces the attention of a layer."""

    def __init__(self, attention: Any, rotate: Rotate) -> None:
        rotates = bool(attention.use_rope)
        super().__init__(attention, rotate if rotates else unrotated)
        config = attention.config
        self.choice = TokenChoice(config.index_topk)
        self.growing = GrowingScale(attention.softmax_scaling)
        self.indexer = (
            None
            if attention.indexer is None
            else HiddenIndexer(attention.indexer, rotate if rotates else unrotated)
        )
        self._kind = "rope" if rotates else "nope"
        self._is_read = bool(attention.store_full_length_kv)
        self._source: int = config.kv_source_layers[attention.layer_idx]
        self._filled = config.qk_rope_head_dim

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **more: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """As LatentAttention's. `shared_kv_states` has what the last layer that is read has written, of each
        kind."""
        positions, shared = more["position_ids"], more["shared_kv_states"]
        if self.indexer is not None:
            backend, place = paged.latent_of_layer[self.layer_idx]
            assert isinstance(backend, SelectsTokens)
            backend.select(place, self.indexer.of_hidden(hidden_states, positions, position_embeddings))
        q_nope, q_rope = self._queries(hidden_states)
        if self.kv_a_proj_with_mqa is None:
            q_rope, _ = self._rotate(q_rope, q_rope[:, :1], position_embeddings)
            latent, k_rope = shared[self._kind]
        else:
            latent, k_rope = self._latents(hidden_states)
            q_rope, k_rope = self._rotate(q_rope, k_rope, position_embeddings)
            if self._is_read:
                shared[self._kind] = latent, k_rope
        grown = self.growing(positions, q_nope.dtype)
        values = self._values(self._source, q_nope * grown, q_rope * grown, latent, k_rope, paged)
        result: torch.Tensor = self.o_proj(values.flatten(1)[None])
        return result, None, None
