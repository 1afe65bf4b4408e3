"""Decoders whose last layers have no keys and values of their own: Gemma 3n's and 4's. These layers compute
only the new tokens that are read.

Nothing follows from the other tokens there: no page holds anything of these layers. With Gemma 4 E2B, where
they are 20 of 35, a prompt takes half the products. transformers does the same for one prompt of Gemma 4 at a
time, and not for Gemma 3n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.device_copies import upload
from engine.paged_cache import PagedCache
from engine.paged_layers import DecoderOutput, PagedLayers


def own_layers(config: Any) -> int:
    """How many layers, the first ones, have keys and values."""
    layers: int = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return layers


def shared_layers(config: Any) -> Mapping[int, int]:
    """Layer -> the earlier layer whose keys and values it reads: the last of its type that has some."""
    own = own_layers(config)
    if own == config.num_hidden_layers:
        return {}
    last = {kind: layer for layer, kind in enumerate(config.layer_types[:own])}
    return {layer: last[config.layer_types[layer]] for layer in range(own, config.num_hidden_layers)}


class KVSharingDecoder(nn.Module):
    """Replaces a decoder of transformers, whose modules it calls.

    A subclass says what goes into the first layer, [..., T, hidden], what each layer adds for a token, and
    what comes out of the last one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model
        self._kinds: list[str] = model.config.layer_types
        self._first_shared = own_layers(model.config)

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
        embedded = model.embed_tokens(input_ids)
        of_layers = self._of_layers(input_ids, embedded)
        rotary = {kind: model.rotary_emb(embedded, position_ids, kind) for kind in set(self._kinds)}
        shared: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind: new K and V, [1, heads, T, dim]
        hidden = self._first(embedded)
        whole, rows, layers = hidden, None, paged
        for number, (kind, layer) in enumerate(zip(self._kinds, model.layers, strict=True)):
            if number == self._first_shared and paged.tail is not None and paged.reads is not None:
                whole, rows, layers = hidden, upload(paged.reads.rows, hidden.device), paged.tail
                if not len(rows):
                    return DecoderOutput(self._unread(whole))
                hidden = hidden[..., rows, :]
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
        hidden = model.norm(self._last(hidden))
        if rows is None:
            return DecoderOutput(hidden)
        return DecoderOutput(self._unread(whole).index_copy(1, rows, hidden))

    def _first(self, embedded: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _of_layers(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """What each layer adds for a token, [1, T, layers, width]; None if none does."""
        raise NotImplementedError

    def _unread(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden] of what goes into a layer."""
        raise NotImplementedError

    def _last(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden] of what comes out of the last layer, before its norm."""
        raise NotImplementedError


class Gemma4Decoder(KVSharingDecoder):
    """Of Gemma4TextModel or Gemma4UnifiedTextModel."""

    def _first(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded

    def _of_layers(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        model = self.decoder
        if not getattr(model, "hidden_size_per_layer_input", 0):
            return None
        of_tokens = model.get_per_layer_inputs(input_ids, embedded)
        result: torch.Tensor = model.project_per_layer_inputs(embedded, of_tokens)
        return result

    def _unread(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _last(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
