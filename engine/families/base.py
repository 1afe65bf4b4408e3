"""Family: what the engine needs to know of a model type to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kvcache.layout import GroupSpec


class Dtypes(NamedTuple):
    """The dtypes in which a checkpoint is served."""

    model: torch.dtype  # weights, activations and states
    kv: torch.dtype  # keys and values, or latents, as stored


def no_further_check(config: Any) -> None:
    """For families that need no checks beside those of the gate."""
    del config


def no_preparation(model: nn.Module) -> None:
    """For families whose modules run unchanged."""
    del model


def nothing_shared(config: Any) -> Mapping[int, int]:
    """For families in which each layer that attends has keys and values of its own."""
    del config
    return {}


@dataclass(frozen=True)
class Family:
    """One model_type. The callables get the transformers config of the text model."""

    architecture: str  # the class that is tested token by token against transformers.generate
    groups: Callable[[Any, Dtypes], tuple[GroupSpec, ...]]  # the groups of a config, the primary group first
    layer_types: frozenset[str] = frozenset({"full_attention"})  # values allowed in config.layer_types
    allows: frozenset[str] = frozenset()  # keys of the gate's table that this family does compute
    check: Callable[[Any], None] = no_further_check  # raises UnsupportedModel
    prepare: Callable[[nn.Module], None] = no_preparation  # replaces modules that cannot take a pack
    published: str | None = None  # what config.json of checkpoints with code of their own calls the class
    shared: Callable[[Any], Mapping[int, int]] = nothing_shared
    """Layer without keys and values of its own -> the earlier layer whose it reads."""
