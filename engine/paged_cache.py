"""The transformers cache that keeps nothing: K/V live in our pages, written by the attention backend."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from engine.states import PackedStates


class PagedCache(Cache):  # type: ignore[misc]
    """Handed to a model as `past_key_values`.

    `update` returns only the new tokens, never gathered context: the attention function that follows writes
    them to their slots and reads the context from the pages in one call (engine/attention.py), so a step
    never copies a context. Nothing here may be asked how long a sequence is: positions come with the batch.
    `states` is for layers that keep a state instead (engine/states.py); None where the model has none.
    """

    def __init__(self, states: PackedStates | None = None) -> None:
        super().__init__(layers=[])
        self.states = states

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves, [1, Hkv, T, D]."""
        return key_states, value_states
