"""The cache object passed to transformers. It stores nothing: the attention backend writes K/V to pages."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from engine.paged_layers import PagedLayers
from engine.states import PackedStates


class PagedCache(Cache):  # type: ignore[misc]
    """Passed to a model as `past_key_values`.

    `update` returns only the new tokens, never gathered context. The attention function that follows writes
    them to their slots and reads the context from the pages in one call (engine/attention.py), so a step
    never copies a context. The cache does not know sequence lengths; positions come with the batch. `states`
    serves layers that keep a state (engine/states.py). It is None if the model has no such layers. `paged` is
    what attention gets as a keyword, for models that pass the cache alone (engine/families/dropped.py).
    """

    def __init__(self, paged: PagedLayers, states: PackedStates | None) -> None:
        super().__init__(layers=[])
        self.paged = paged
        self.states = states

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged, [1, Hkv, T, D]."""
        return key_states, value_states
