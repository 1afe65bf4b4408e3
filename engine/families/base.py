"""Family: what the engine must know of a model type before it may run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kvcache.layout import GroupSpec


class Dtypes(NamedTuple):
    """What a checkpoint is served in."""

    model: torch.dtype  # weights, activations and states
    kv: torch.dtype  # keys and values, or latents, as stored


def no_further_check(config: Any) -> None:
    """The gate's common table is enough."""
    del config


def no_preparation(model: nn.Module) -> None:
    """The modules run as transformers wrote them."""
    del model


@dataclass(frozen=True)
class Family:
    """One model_type. `config` is always the transformers config of the text model."""

    architecture: str  # the class that is tested token by token against transformers.generate
    groups: Callable[[Any, Dtypes], tuple[GroupSpec, ...]]  # of a config; the first decides reuse
    layer_types: frozenset[str] = frozenset({"full_attention"})  # what config.layer_types may hold
    allows: frozenset[str] = frozenset()  # keys of the gate's table that this family computes after all
    check: Callable[[Any], None] = no_further_check  # raises UnsupportedModel
    prepare: Callable[[nn.Module], None] = no_preparation  # replaces modules that cannot run a pack
