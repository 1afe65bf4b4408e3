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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.paged_layers import PagedLayers

Rotate = Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
"""(q [1, heads, T, rope_dim], k [1, 1, T, rope_dim], the model's position embeddings) -> both rotated."""


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
        self.q_proj = attention.q_proj  # None if queries are projected through a low rank
        self.q_a_proj = attention.q_a_proj
        self.q_a_layernorm = attention.q_a_layernorm
        self.q_b_proj = attention.q_b_proj
        self.kv_a_proj_with_mqa = attention.kv_a_proj_with_mqa
        self.kv_a_layernorm = attention.kv_a_layernorm
        self.o_proj = attention.o_proj
        expand: torch.Tensor = attention.kv_b_proj.weight.detach()  # [heads x (nope_dim + v_dim), rank]
        per_head = expand.view(attention.num_heads, -1, self._rank)
        w_uk, w_uv = per_head[:, : self._nope_dim], per_head[:, self._nope_dim :].transpose(1, 2)
        self.w_uk = nn.Parameter(w_uk.contiguous(), requires_grad=False)  # [heads, nope_dim, rank]
        self.w_uv = nn.Parameter(w_uv.contiguous(), requires_grad=False)  # [heads, rank, v_dim]

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, paged: PagedLayers, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden] -> the same shape, as in the replaced module."""
        q_nope, q_rope = self._queries(hidden_states)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split((self._rank, self._rope_dim), dim=-1)
        latent = self.kv_a_layernorm(latent)[0]
        q_rope, k_rope = self._rotate(q_rope, k_rope[:, None], position_embeddings)
        q_latent = torch.bmm(q_nope[0], self.w_uk).transpose(0, 1)  # [T, heads, rank]
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        backend, place = paged.latent_of_layer[self.layer_idx]
        backend.forward(place, q_latent, q_rope[0].transpose(0, 1), latent, k_rope[0, 0], out)
        values = torch.bmm(out.transpose(0, 1), self.w_uv)  # [heads, T, v_dim]
        return self.o_proj(values.transpose(0, 1).flatten(1)[None]), None

    def _queries(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries before rotation: [1, heads, T, nope_dim] and [1, heads, T, rope_dim]."""
        if self.q_proj is not None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        queries = queries.unflatten(-1, (len(self.w_uk), -1)).transpose(1, 2)
        q_nope, q_rope = queries.split((self._nope_dim, self._rope_dim), dim=-1)
        return q_nope, q_rope
