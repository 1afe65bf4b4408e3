"""The seam to transformers: one attention function that hands every layer to a paged backend.

A transformers attention layer calls `PagedCache.update` and then the function registered here. The
PagedLayers travel through the model as the keyword `paged`, which every decoder in the gate's table passes
down to its attention function. No mask function is registered under our name: transformers then builds no
mask at all, and a paged backend is causal within each sequence by itself. (A registered mask function would
be handed a `[T, T]` mask of the whole pack to fill, for nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.latent import LatentBackend
    from kvcache.layout import GroupSpec

ATTENTION_NAME = "baton_paged"


class AttentionBackend(Protocol):
    """Paged attention over one KV group of keys and values.

    A backend is built as `Backend(pool, query_heads, scale)`: `pool` a kvcache MHAKVCache, `scale` the
    factor on q.k; `pool.spec.window` says how far back a query sees. It is used from one thread.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Once per step, before the first layer: keep what every layer needs of the batch."""
        ...

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the new tokens' K and V to the batch's out_slots, THEN attend over each sequence's pages.

        place: of the layer in a page (index into the group's layer_ids). q: [T, query
        heads, head_dim]; k_new, v_new: [T, KV heads, head_dim]; their last dimension is contiguous, the rest
        strided as the model left them. out: [T, query heads, head_dim], contiguous, filled in place. Query i
        of a sequence sees its context up to and including itself, or the window that ends there. sinks:
        [query heads] logits, one more in each softmax, that carry no value. Writing and attending are one
        call, so that a backend can make them one op.
        """
        ...


class PagedLayers:
    """A model's attention backends, one per KV group, and which layer is whose."""

    def __init__(
        self,
        full: AttentionBackend | None,
        window: AttentionBackend | None,
        groups: Sequence[GroupSpec],
        latent: LatentBackend | None = None,
    ) -> None:
        self.full = full
        self.window = window
        self.latent = latent
        backends = {"full": full, "window": window}
        self.of_layer: dict[int, tuple[AttentionBackend, int]] = {
            layer: (backend, place)
            for group in groups
            if (backend := backends.get(group.kind)) is not None
            for place, layer in enumerate(group.layer_ids)
        }
        self.latent_of_layer: dict[int, tuple[LatentBackend, int]] = {
            layer: (latent, place)
            for group in groups
            if latent is not None and group.kind == "latent"
            for place, layer in enumerate(group.layer_ids)
        }

    def prepare(self, batch: ForwardBatch) -> None:
        """Once per step, before the first layer."""
        if self.full is not None:
            self.full.prepare(batch)
        if self.window is not None:
            self.window.prepare(batch.for_window())
        if self.latent is not None:
            self.latent.prepare(batch)


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
    """The registered function. query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].

    `s_aux` are attention sinks, [Hq] logits that join each softmax and carry no value (gpt-oss). Options of
    other attention functions (dropout, scaling, sliding window) are in `_kwargs`: the loader has read them
    from the modules once, and the backends were built with them.
    """
    assert attention_mask is None
    assert query.shape[0] == 1
    q = query.transpose(1, 2)[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    layer: int = module.layer_idx  # type: ignore[assignment]
    backend, place = paged.of_layer[layer]
    backend.forward(place, q, key.transpose(1, 2)[0], value.transpose(1, 2)[0], out, s_aux)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
