"""The transformers modules that are replaced on CUDA (engine/replacement_table.py: apply_replacements).

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

from engine.checkpoint.stored import StoredTensor
from engine.config import EngineConfig
from engine.cuda import triton_kernels
from engine.cuda.decoder import FlashInferDecoder, fusible
from engine.cuda.layers import (
    FlashInferMLP,
    FlashInferNorm,
    StoredLinear,
    fusible_mlp,
    has_weight,
)
from engine.cuda.limits import DTYPES
from engine.cuda.state_layers import delta_steps, mamba2_steps
from engine.cuda.stored_experts import StoredExperts
from engine.cuda.stored_product import Products
from engine.decoder_parts import DECODERS, is_mixture
from engine.delta_forms import DELTA_NETS
from engine.layer_classes import EXPERTS, MLPS, NORMS, NORMS_PLUS_ONE
from engine.mamba2_forms import MAMBA2
from engine.replacement_table import ReplacementTable, apply_replacements

log = logging.getLogger(__name__)


def register(table: ReplacementTable, kept: set[str]) -> None:
    """Add CUDA's replacements, for one model. They add to `kept` the names of stored formats they take."""
    products = Products(kept)
    for name in DECODERS:
        table[name] = partial(_replace_decoder, table, products)
    for name in MLPS:
        table[name] = partial(_replace, fusible_mlp, partial(FlashInferMLP, products=products))
    for name in (*NORMS, *NORMS_PLUS_ONE):
        table[name] = partial(_replace, has_weight, FlashInferNorm)
    for name in EXPERTS:
        table[name] = partial(_replace, lambda _: True, partial(StoredExperts.of, products=products))
    for names, steps in ((DELTA_NETS, delta_steps), (MAMBA2, mamba2_steps)):
        for name in names:
            table[name] = partial(_replace_mixer, table, steps)
    table["Linear"] = partial(_replace, _is_stored, partial(StoredLinear, products=products))


def _replace_decoder(
    table: ReplacementTable, products: Products, model: nn.Module, config: EngineConfig
) -> nn.Module | None:
    """Replace a whole decoder, and the parts of its mixtures, which stay otherwise."""
    fused = _replace(fusible, partial(FlashInferDecoder, products=products), model, config)
    if isinstance(fused, FlashInferDecoder):
        for mixture in filter(is_mixture, fused.mlps):
            apply_replacements(mixture, config, table)
    return fused


def _replace_mixer(
    table: ReplacementTable,
    steps: Callable[[nn.Module], nn.Module | None],
    mixer: nn.Module,
    config: EngineConfig,
) -> nn.Module | None:
    """Replace what is between the projections of a layer that keeps a state, and the projections first."""
    if config.linear == "torch" or not triton_kernels.available():
        return None
    if not any(parameter.dtype in DTYPES for parameter in mixer.parameters()):
        return None
    apply_replacements(mixer, config, table)
    return steps(mixer)


def keeps_stored_weights(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Whether stored weights stay stored."""
    wanted = config.linear != "torch" and config.weight_dtype == "auto"
    return wanted and dtype in DTYPES and triton_kernels.available()


def _is_stored(linear: Any) -> bool:
    return isinstance(linear.weight, StoredTensor)


def _replace(
    fits: Callable[[Any], bool],
    build: Callable[[Any], nn.Module | None],
    module: nn.Module,
    config: EngineConfig,
) -> nn.Module | None:
    """Replace a module that `fits` by what `build` makes of it; `linear: torch` keeps it."""
    if config.linear == "torch" or not fits(module) or next(module.parameters()).dtype not in DTYPES:
        return None
    try:
        return build(module)
    except ImportError as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(error: str) -> None:
    log.warning("layers stay transformers' own, which is slower: %s", error)
