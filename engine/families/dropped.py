"""Families whose layers drop the keyword `paged` on its way to attention."""

from __future__ import annotations

from typing import Any

from torch import nn


def pass_paged(model: Any) -> None:
    """Each attention takes it from the cache, which the layers do pass."""
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(_add_paged, with_kwargs=True)


def _add_paged(
    _attention: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return positional, {**keywords, "paged": keywords["past_key_values"].paged}
