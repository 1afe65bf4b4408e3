"""Replaces slow modules after loading with faster modules that compute the same.

The table maps the class name of a transformers module to a function that returns its replacement, or None to
keep this instance. engine/cpu and engine/cuda fill it. In float32 no replacement may change a greedy token.
Each replacement has a test that compares it with the original module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from common.errors import ConfigError
from common.freed_memory import return_freed_memory
from engine.config import EngineConfig

Replace = Callable[[nn.Module, EngineConfig], nn.Module | None]
ReplacementTable = dict[str, Replace]


def apply_replacements(model: nn.Module, config: EngineConfig, table: ReplacementTable) -> dict[str, int]:
    """Replace modules in place, outermost first. The children of a replacement are not searched.

    Returns the number of modules replaced, by class name.
    """
    done: dict[str, int] = {}
    _replace_children(model, config, table, done)
    return done


def _replace_children(
    module: nn.Module, config: EngineConfig, table: ReplacementTable, done: dict[str, int]
) -> None:
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        kind = type(child).__name__
        replace = table.get(kind)
        replacement = replace(child, config) if replace else None
        if replacement is None:
            _replace_children(child, config, table, done)
            continue
        setattr(module, name, replacement)
        del child  # its weights are freed before the next module is replaced
        return_freed_memory()
        done[kind] = done.get(kind, 0) + 1


def check_weight_dtype(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raises ConfigError if weights that are loaded in `dtype` cannot become `config.weight_dtype`."""
    wanted = config.weight_dtype
    if wanted == "auto":
        return
    if wanted == "bfloat16" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError("weight_dtype", f"weights are computed in {name}", "use dtype bfloat16")
    if torch.device(config.device).type != "cpu":
        if wanted == "bfloat16":
            return
        problem = f"{wanted} is for device cpu, not {config.device}"
        raise ConfigError("weight_dtype", problem, "use auto")
    from engine.cpu.module_replacements import check_packs

    check_packs(config, dtype)


def takes_stored_weights(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Whether the replacements for `config.device` take StoredTensors of a model in `dtype`."""
    kind = torch.device(config.device).type
    if kind == "cpu":
        from engine.cpu.module_replacements import packs

        return dtype == torch.bfloat16 and packs(config)
    if kind == "cuda":
        from engine.cuda.module_replacements import keeps_stored_weights

        return keeps_stored_weights(config, dtype)
    return False


def replacement_table(config: EngineConfig, kept: set[str]) -> ReplacementTable:
    """The replacements for `config.device`: those of engine/cpu on a CPU, of engine/cuda on CUDA.

    Replacements that compute with weights as the checkpoint stored them add the format's name to `kept`.
    """
    table: ReplacementTable = {}
    kind = torch.device(config.device).type
    if kind == "cpu":
        from engine.cpu.module_replacements import register

        register(table, kept)
    elif kind == "cuda":
        from engine.cuda.module_replacements import register as register_cuda

        register_cuda(table, kept)
    return table
