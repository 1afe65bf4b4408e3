"""The transformers modules that are replaced on CUDA (engine/module_replacements.py: apply_replacements).

In float16 and bfloat16 only: in float32 all layers stay transformers' own, so that greedy tokens equal
theirs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.config import EngineConfig
from engine.cuda.decoder import MODELS, FlashInferDecoder, fusible
from engine.cuda.layers import MLPS, NORMS, NORMS_PLUS_ONE, FlashInferMLP, FlashInferNorm, fusible_mlp
from engine.cuda.limits import DTYPES

log = logging.getLogger(__name__)


def register(table: dict[str, Callable[[nn.Module, EngineConfig], nn.Module | None]]) -> None:
    """Add CUDA's replacements."""
    for name in MODELS:
        table[name] = partial(_replace, fusible, FlashInferDecoder)
    for name in MLPS:
        table[name] = partial(_replace, fusible_mlp, FlashInferMLP)
    for name in (*NORMS, *NORMS_PLUS_ONE):
        table[name] = partial(_replace, lambda _: True, FlashInferNorm)


def _replace(
    fits: Callable[[Any], bool], build: Callable[[Any], nn.Module], module: nn.Module, config: EngineConfig
) -> nn.Module | None:
    """Replace a module that `fits` by what `build` makes of it; `linear: torch` keeps it."""
    dtype: torch.dtype = next(module.parameters()).dtype
    if config.linear == "torch" or dtype not in DTYPES or not fits(module):
        return None
    try:
        return build(module)
    except ImportError as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(error: str) -> None:
    log.warning("layers stay transformers' own, which is slower: %s", error)
