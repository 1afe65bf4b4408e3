"""The replacements of modules for a device: those of engine/cpu and engine/cuda."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.replacement_table import ReplacementTable


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
