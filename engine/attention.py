"""The attention function that transformers calls. It passes each layer to a paged backend.

A transformers attention layer calls `PagedCache.update` and then the function registered here. The
PagedLayers object reaches this function as the keyword argument `paged`, which every decoder in the gate's
table passes down. No mask function is registered under this name, so transformers builds no mask: a paged
backend applies causal masking within each sequence itself. (transformers would give a registered mask
function a `[T, T]` mask of the whole pack to fill, and nothing would read it.)
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from engine.paged_layers import PagedLayers

ATTENTION_NAME = "baton_paged"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedLayers,
    s_aux: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over pages. query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv].

    `s_aux` holds attention sinks (gpt-oss): [Hq] logits that join each softmax and carry no value. `_kwargs`
    holds the options of other attention functions (dropout, scaling, sliding window). They are not read here:
    the loader reads them from the modules once, and the backends are built with them.
    """
    assert attention_mask is None
    assert query.shape[0] == 1
    layer: int = module.layer_idx  # type: ignore[assignment]
    backend, place = paged.of_layer[layer]
    q, k, v = (paged.filled_up(layer, heads).transpose(1, 2)[0] for heads in (query, key, value))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    backend.forward(place, q, k, v, out, s_aux)
    return out[None, ..., : value.shape[-1]], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
