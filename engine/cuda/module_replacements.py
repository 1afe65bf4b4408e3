"""The transformers modules that are replaced on CUDA (engine/module_replacements.py: apply_replacements).

In float16 and bfloat16 only: in float32 all layers stay transformers' own, so that greedy tokens equal
theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from engine.config import EngineConfig
from engine.cuda.decoder import MODELS, FlashInferDecoder, fusible
from engine.cuda.limits import DTYPES

log = logging.getLogger(__name__)


def register(table: dict[str, Callable[[nn.Module, EngineConfig], nn.Module | None]]) -> None:
    """Add CUDA's replacements."""
    for name in MODELS:
        table[name] = _decoder


def _decoder(model: nn.Module, config: EngineConfig) -> nn.Module | None:
    """Replace a whole decoder; `linear: torch` keeps it."""
    dtype: torch.dtype = next(model.parameters()).dtype
    if config.linear == "torch" or dtype not in DTYPES or not fusible(model):
        return None
    try:
        return FlashInferDecoder(model)
    except ImportError as error:
        log.warning("the decoder's layers stay transformers' own, which is slower: %s", error)
        return None
