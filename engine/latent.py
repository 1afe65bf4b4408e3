"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434).

The keys and values of all heads are linear functions of one short vector per token, the latent c. The keys
also have a rotated part k_rope, which all heads share:

    k_h = [W_uk[h] c | k_rope]        v_h = W_uv[h] c

transformers computes keys and values from the latents of the whole context in every step (it expands them).
Here the pages hold the latents, and the two matrices are applied to the queries and results of the new
tokens, which are few:

    q_h . k_h  =  (W_uk[h]^T q_nope_h) . c  +  q_rope_h . k_rope
    sum_j p_j v_h[j]  =  W_uv[h] (sum_j p_j c[j])

So for a backend all heads attend to ONE key per token, [c | k_rope], and the first part of the key is also
its value. Prefill uses the same form; docs/decisions/0009 has the measurement.

Sparse attention (DeepSeek-V3.2-Exp, section 2.1) attends to the tokens that an indexer chooses: those with
the highest sums over its heads of w_h relu(q_h . k), where q_h and w_h are of the query, and k of the token.
The backend keeps k beside the latent, and the choice for the layers that follow without an indexer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.paged_layers import IndexInputs, PagedLayers, SelectsTokens
from engine.token_choice import TokenChoice

Rotate = Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
"""(q [1, heads, T, rope_dim], k [1, 1, T, rope_dim], the model's position embeddings) -> both rotated."""


def unrotated(q: torch.Tensor, k: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A Rotate of models whose latent layers know no positions (Kimi Linear)."""
    return q, k


class LatentAttention(nn.Module):
    """Replaces DeepSeek's attention, or one of the same form, after loading.

    It keeps their projections except kv_b_proj, whose weight becomes W_uk and W_uv. Each is copied into the
    order in which its product reads it: with views of the one weight, a bfloat16 product on CPU takes 7 times
    as long, because the weight is transposed.
    """

    def __init__(self, attention: Any, rotate: Rotate) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling  # factor on scores; includes yarn's factor
        self._rope_dim: int = attention.qk_rope_head_dim
        self._nope_dim: int = attention.qk_nope_head_dim
        self._rank: int = attention.kv_lora_rank
        self._rotate = rotate
        self._filled = self._rope_dim  # width of the rotated part in a row, zeros behind what it has
        self.sinks: torch.Tensor | None = getattr(attention, "sinks", None)  # [heads]
        self.q_proj = getattr(attention, "q_proj", None)  # None if queries are projected through a low rank
        self.q_a_proj: Any = getattr(attention, "q_a_proj", None)
        self.q_a_layernorm: Any = getattr(attention, "q_a_layernorm", None)
        self.q_b_proj: Any = getattr(attention, "q_b_proj", None)
        self.kv_a_proj_with_mqa = attention.kv_a_proj_with_mqa
        self.kv_a_layernorm = attention.kv_a_layernorm
        self.o_proj = attention.o_proj
        expand: torch.Tensor = attention.kv_b_proj.weight.detach()  # [heads x (nope_dim + v_dim), rank]
        per_head = expand.view(attention.num_heads, -1, self._rank)
        w_uk, w_uv = per_head[:, : self._nope_dim], per_head[:, self._nope_dim :].transpose(1, 2)
        self.w_uk = nn.Parameter(w_uk.contiguous(), requires_grad=False)  # [heads, nope_dim, rank]
        self.w_uv = nn.Parameter(w_uv.contiguous(), requires_grad=False)  # [heads, rank, v_dim]

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """hidden_states [1, T, hidden] -> the same shape, as in the replaced module. A model that rotates
        nothing has no position_embeddings."""
        queries = self._queries(self._compressed(hidden_states))
        return self._attend(hidden_states, queries, position_embeddings, paged), None

    def _attend(
        self,
        hidden_states: torch.Tensor,
        queries: tuple[torch.Tensor, torch.Tensor],
        angles: Any,
        paged: PagedLayers,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`queries` are those of _queries(). `gates`, [T, heads, v_dim] or what becomes that, multiply what
        the heads return."""
        q_nope, q_rope = queries
        latent, k_rope = self._latents(hidden_states)
        q_rope, k_rope = self._rotate(q_rope, k_rope, angles)
        values = self._values(self.layer_idx, q_nope, q_rope, latent, k_rope, paged)
        if gates is not None:
            values = (values * gates).to(values.dtype)
        result: torch.Tensor = self.o_proj(values.flatten(1)[None])
        return result

    def _latents(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed latents [T, rank], and [1, 1, T, rope_dim] before rotation."""
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split((self._rank, self._rope_dim), dim=-1)
        return self.kv_a_layernorm(latent)[0], k_rope[:, None]

    def _values(
        self,
        layer: int,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        paged: PagedLayers,
    ) -> torch.Tensor:
        """What heads return that attend to the latents of a layer, [T, heads, v_dim]."""
        if missing := self._filled - self._rope_dim:
            q_rope, k_rope = (functional.pad(part, (0, missing)) for part in (q_rope, k_rope))
        q_latent = torch.bmm(q_nope[0], self.w_uk).transpose(0, 1)  # [T, heads, rank]
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        backend, place = paged.latent_of_layer[layer]
        backend.forward(place, q_latent, q_rope[0].transpose(0, 1), latent, k_rope[0, 0], out, self.sinks)
        return torch.bmm(out.transpose(0, 1), self.w_uv).transpose(0, 1)

    def _compressed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the queries are linear functions of, [1, T, n]."""
        if self.q_proj is not None:
            return hidden_states
        compressed: torch.Tensor = self.q_a_layernorm(self.q_a_proj(hidden_states))
        return compressed

    def _queries(self, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries before rotation: [1, heads, T, nope_dim] and [1, heads, T, rope_dim]."""
        project = self.q_b_proj if self.q_proj is None else self.q_proj
        queries = project(compressed).unflatten(-1, (len(self.w_uk), -1)).transpose(1, 2)
        q_nope, q_rope = queries.split((self._nope_dim, self._rope_dim), dim=-1)
        return q_nope, q_rope


class ScaledLatentAttention(LatentAttention):
    """Of Mistral 4, whose queries grow with their position p: they are multiplied by
    1 + beta log(1 + floor(p / original_max_position_embeddings)), as in Llama 4."""

    def __init__(self, attention: Any, rotate: Rotate) -> None:
        super().__init__(attention, rotate)
        rope = attention.config.rope_parameters
        self._beta: float = rope["llama_4_scaling_beta"]
        self._original_positions: int = rope["original_max_position_embeddings"]

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **more: Any
    ) -> tuple[torch.Tensor | None, ...]:
        positions: torch.Tensor = more["position_ids"]  # [1, T]
        growth = torch.log1p(torch.floor(positions / self._original_positions))
        scale = (1 + self._beta * growth)[..., None]  # [1, T, 1]
        # Queries are linear functions of this, without a bias.
        compressed = self._compressed(hidden_states)
        compressed = compressed * scale.to(compressed.dtype)
        return self._attend(hidden_states, self._queries(compressed), position_embeddings, paged), None


class HeadGatedLatentAttention(LatentAttention):
    """Of Ling 3, in which what a head returns is multiplied by a gate."""

    def __init__(self, attention: Any, rotate: Rotate) -> None:
        super().__init__(attention, rotate)
        self.g_proj = attention.g_proj

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        queries = self._queries(self._compressed(hidden_states))
        gates = torch.sigmoid(self.g_proj(hidden_states)[0].float()).to(hidden_states.dtype)[..., None]
        return self._attend(hidden_states, queries, position_embeddings, paged, gates), None


class Indexer(nn.Module):
    """Replaces the indexer of one layer. It keeps its projections.

    DeepSeek's own code multiplies q and k with a Hadamard matrix before it rounds them to fp8. That changes
    no product of them, and nothing is rounded here.
    """

    def __init__(self, indexer: Any, rotate: Rotate, rotates_first: bool = True) -> None:
        """`rotates_first`: the first values of a head are rotated, not the last."""
        super().__init__()
        self.wq_b = indexer.wq_b
        self.wk = indexer.wk
        self.k_norm = indexer.k_norm
        self.weights_proj = indexer.weights_proj
        # Beside float16 transformers keeps it in float32. A module that replaces it may hide its weight.
        self._weights_dtype: torch.dtype = indexer.weights_proj.weight.dtype
        self._heads: int = indexer.n_heads
        self._dim: int = indexer.head_dim
        rope_dim: int = indexer.qk_rope_head_dim
        self._rotated = slice(rope_dim) if rotates_first else slice(-rope_dim, None)
        self._rotate = rotate
        self._scale: float = (self._heads * self._dim) ** -0.5

    def forward(self, hidden_states: torch.Tensor, compressed: torch.Tensor, angles: Any) -> IndexInputs:
        """hidden_states [1, T, hidden]; compressed [1, T, q_lora_rank], as the queries have it."""
        return self.rotated(self.unrotated(hidden_states, compressed), angles)

    def unrotated(self, hidden_states: torch.Tensor, compressed: torch.Tensor) -> IndexInputs:
        """q [1, heads, T, dim], k [1, 1, T, dim] and weights [1, T, heads]."""
        q = self.wq_b(compressed).unflatten(-1, (self._heads, self._dim)).transpose(1, 2)
        normed = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype))  # may be in float32
        weights = self.weights_proj(hidden_states.to(self._weights_dtype)).float() * self._scale
        return IndexInputs(q, normed.to(hidden_states.dtype)[:, None], weights)

    def rotated(self, inputs: IndexInputs, angles: Any) -> IndexInputs:
        """What unrotated() returns, rotated in place and in the shapes of IndexInputs."""
        q, k, part = inputs.q, inputs.k, self._rotated
        q[..., part], k[..., part] = self._rotate(q[..., part], k[..., part], angles)
        return IndexInputs(q[0].transpose(0, 1), k[0, 0], inputs.weights[0])


class SparseLatentAttention(LatentAttention):
    """Replaces attention whose layers have an indexer, or go on with what an earlier layer's has chosen."""

    _index_rotates_first = True

    def __init__(self, attention: Any, rotate: Rotate, rotate_index: Rotate) -> None:
        super().__init__(attention, rotate)
        self.choice = TokenChoice(attention.config.index_topk)
        self.indexer = (
            None
            if attention.indexer is None
            else Indexer(attention.indexer, rotate_index, self._index_rotates_first)
        )

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        compressed = self._compressed(hidden_states)
        self._select(hidden_states, compressed, position_embeddings, paged)
        return self._attend(hidden_states, self._queries(compressed), position_embeddings, paged), None

    def _select(
        self, hidden_states: torch.Tensor, compressed: torch.Tensor, angles: Any, paged: PagedLayers
    ) -> None:
        if self.indexer is not None:
            backend, place = paged.latent_of_layer[self.layer_idx]
            assert isinstance(backend, SelectsTokens)
            backend.select(place, self.indexer(hidden_states, compressed, angles))


class GatedSparseLatentAttention(SparseLatentAttention):
    """Of A.X K2, in which one projection has the queries and the gates of what the heads return."""

    def __init__(self, attention: Any, rotate: Rotate, rotate_index: Rotate) -> None:
        super().__init__(attention, rotate, rotate_index)
        self.q_gate_proj = attention.q_gate_proj

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        plain = self.q_a_proj(hidden_states)
        compressed = self.q_a_layernorm(plain)
        self._select(hidden_states, compressed, position_embeddings, paged)
        both = self.q_gate_proj(torch.cat((compressed, plain), dim=-1)).unflatten(-1, (len(self.w_uk), -1))
        q_nope, q_rope, gates = both.split((self._nope_dim, self._rope_dim, self.w_uv.shape[-1]), dim=-1)
        queries = q_nope.transpose(1, 2), q_rope.transpose(1, 2)
        gates = torch.sigmoid(gates[0].float())
        return self._attend(hidden_states, queries, position_embeddings, paged, gates), None


class SharingLatentAttention(SparseLatentAttention):
    """Of GLM, in which transformers hands a choice from layer to layer. Here the backend keeps it."""

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        return *super().forward(hidden_states, paged, position_embeddings), None


class HunyuanLatentAttention(SparseLatentAttention):
    """Of Hunyuan 4, which hands a choice from layer to layer as GLM does. Its heads have sinks and gates."""

    _index_rotates_first = False

    def __init__(self, attention: Any, rotate: Rotate, rotate_index: Rotate) -> None:
        super().__init__(attention, rotate, rotate_index)
        self.gate_proj = attention.gate_proj

    def forward(
        self, hidden_states: torch.Tensor, paged: PagedLayers, position_embeddings: Any = None, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        compressed = self._compressed(hidden_states)
        self._select(hidden_states, compressed, position_embeddings, paged)
        gates = torch.sigmoid(self.gate_proj(hidden_states)[0]).view(len(compressed[0]), len(self.w_uk), -1)
        queries = self._queries(compressed)
        return self._attend(hidden_states, queries, position_embeddings, paged, gates), None, None
