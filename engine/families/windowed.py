"""Families in which some or all layers may see only a window of tokens. These layers form their own group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.errors import UnsupportedModel
from engine.families.base import Dtypes, Family
from engine.families.dense import full_group
from kvcache.layout import KVGroupSpec

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
Sliding = Callable[[Any], tuple[int, ...]]


def _named(config: Any) -> tuple[int, ...]:
    """The layers that layer_types marks as sliding."""
    return tuple(i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention")


def _every(config: Any) -> tuple[int, ...]:
    """All layers if the config has a window, else none. These families do not read layer_types."""
    return () if config.sliding_window is None else tuple(range(config.num_hidden_layers))


def _groups_of(sliding: Sliding) -> Callable[[Any, Dtypes], tuple[KVGroupSpec, ...]]:
    """The full group comes first even if it has no layers, because its page ids name the token pages."""

    def groups(config: Any, dtypes: Dtypes) -> tuple[KVGroupSpec, ...]:
        windowed = sliding(config)
        rest = tuple(i for i in range(config.num_hidden_layers) if i not in windowed)
        full = full_group(config, dtypes, rest)
        if not windowed:
            return (full,)
        return full, replace(full, layer_ids=windowed, name="window", window=config.sliding_window)

    return groups


def _check_named(config: Any) -> None:
    """If there are sliding layers, sliding_window must be valid."""
    if _named(config):
        _check_window(config)


def _check_every(config: Any) -> None:
    """layer_types, if a config has it, must match what the model computes in every layer."""
    window = config.sliding_window
    if window is not None:
        _check_window(config)
    computed = "full_attention" if window is None else "sliding_attention"
    if set(getattr(config, "layer_types", None) or ()) - {computed}:
        raise UnsupportedModel(
            f"sliding_window is {window} in config.json: every layer is {computed}, but layer_types differs",
            "use a checkpoint without layer_types",
        )


def _check_window(config: Any) -> None:
    window = config.sliding_window
    if not isinstance(window, int) or window < 2:
        # With 1, generate() of transformers does not agree with its own forward: its cache keeps every token.
        raise UnsupportedModel(
            f"sliding_window is {window} in config.json, but there are sliding layers",
            "use a checkpoint whose sliding_window is at least 2",
        )


def _by_layer_type(architecture: str) -> Family:
    """A family in which layer_types names the layers that have sliding_window. It may name none."""
    return Family(architecture, _groups_of(_named), _LAYER_TYPES, check=_check_named)


def _all_alike(architecture: str) -> Family:
    """A family in which sliding_window, unless null, applies to every layer."""
    return Family(architecture, _groups_of(_every), _LAYER_TYPES, check=_check_every)


class CappedHead(nn.Module):
    """A projection onto the vocabulary whose logits x become cap tanh(x / cap)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head = head
        self._cap = cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        logits: torch.Tensor = self.head(hidden)
        return torch.tanh(logits / self._cap) * self._cap


def _cap_logits(model: Any) -> None:
    if model.config.final_logit_softcapping is not None:
        model.lm_head = CappedHead(model.lm_head, model.config.final_logit_softcapping)


FAMILIES: dict[str, Family] = {
    "mixtral": _all_alike("MixtralForCausalLM"),
    "phi3": _all_alike("Phi3ForCausalLM"),
    "qwen2_moe": _by_layer_type("Qwen2MoeForCausalLM"),
    "gemma2": replace(
        _by_layer_type("Gemma2ForCausalLM"),
        allows=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
        prepare=_cap_logits,
    ),
    "mistral": _all_alike("MistralForCausalLM"),
    "qwen2": _by_layer_type("Qwen2ForCausalLM"),
    "qwen3": _by_layer_type("Qwen3ForCausalLM"),
    "qwen3_moe": _all_alike("Qwen3MoeForCausalLM"),
    "gemma3_text": _by_layer_type("Gemma3ForCausalLM"),
    "gpt_oss": _by_layer_type("GptOssForCausalLM"),
}
