"""Gemma 4's decoder. Its last layers, which have no keys and values of their own, compute only the new tokens
that are read.

Nothing follows from the other tokens there: no page holds anything of these layers. With E2B, where they are
20 of 35, a prompt takes half the products. transformers does the same for one prompt at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.device_copies import upload
from engine.paged_cache import PagedCache
from engine.paged_layers import DecoderOutput, PagedLayers


class Gemma4Decoder(nn.Module):
    """Replaces transformers' Gemma4TextModel or Gemma4UnifiedTextModel, whose modules it calls."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model
        self._kinds: list[str] = model.config.layer_types
        self._first_shared: int = model.first_kv_shared_layer_idx

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: PagedCache,
        paged: PagedLayers,
        **_: Any,
    ) -> DecoderOutput:
        """input_ids, position_ids [1, T] -> last_hidden_state [1, T, hidden], normalised.

        Of tokens that are not read (PagedLayers.reads) it is what goes into the first shared layer, which is
        not finite where a K or V is not.
        """
        model = self.decoder
        hidden = model.embed_tokens(input_ids)
        of_layers = self._of_layers(input_ids, hidden)
        rotary = {kind: model.rotary_emb(hidden, position_ids, kind) for kind in set(self._kinds)}
        shared: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind: new K and V, [1, heads, T, dim]
        whole, rows, layers = hidden, None, paged
        for number, (kind, layer) in enumerate(zip(self._kinds, model.layers, strict=True)):
            if number == self._first_shared and paged.tail is not None and paged.reads is not None:
                whole, rows, layers = hidden, upload(paged.reads.rows, hidden.device), paged.tail
                if not len(rows):
                    return DecoderOutput(whole)
                hidden = hidden[:, rows]
                of_layers = None if of_layers is None else of_layers[:, rows]
                rotary = {kind: (cos[:, rows], sin[:, rows]) for kind, (cos, sin) in rotary.items()}
                shared = {kind: (k[:, :, rows], v[:, :, rows]) for kind, (k, v) in shared.items()}
            more = {} if of_layers is None else {"per_layer_input": of_layers[:, :, number]}
            hidden = layer(
                hidden,
                **more,
                shared_kv_states=shared,
                position_embeddings=rotary[kind],
                attention_mask=None,
                past_key_values=past_key_values,
                paged=layers,
            )
        hidden = model.norm(hidden)
        if rows is None:
            return DecoderOutput(hidden)
        return DecoderOutput(whole.index_copy(1, rows, hidden))

    def _of_layers(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """What each layer adds for a token, [1, T, layers, width]; None if none does."""
        model = self.decoder
        if not getattr(model, "hidden_size_per_layer_input", 0):
            return None
        of_tokens = model.get_per_layer_inputs(input_ids, embedded)
        result: torch.Tensor = model.project_per_layer_inputs(embedded, of_tokens)
        return result
