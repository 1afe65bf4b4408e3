"""Layer replacements: slow modules replaced after loading by faster ones that compute the same.

The table maps a module's class name (as transformers spells it) to a function that returns its replacement,
or None to leave this instance alone. engine/cpu fills it. In float32 no swap may change a greedy token; each
one has an equality test next to where it is registered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.config import EngineConfig

Swap = Callable[[nn.Module, EngineConfig], nn.Module | None]
SwapTable = dict[str, Swap]


def apply_replacements(model: nn.Module, config: EngineConfig, table: SwapTable) -> dict[str, int]:
    """Replace modules in place, outermost first; what replaced a module is not searched again.

    Returns how many of each class were replaced, for the start-up log.
    """
    done: dict[str, int] = {}
    _swap_children(model, config, table, done)
    return done


def _swap_children(module: nn.Module, config: EngineConfig, table: SwapTable, done: dict[str, int]) -> None:
    for name, child in list(module.named_children()):
        kind = type(child).__name__
        swap = table.get(kind)
        replacement = swap(child, config) if swap else None
        if replacement is None:
            _swap_children(child, config, table, done)
            continue
        setattr(module, name, replacement)
        done[kind] = done.get(kind, 0) + 1


def swap_table(config: EngineConfig) -> SwapTable:
    """The replacements for `config.device`: engine/cpu's on a CPU, none elsewhere yet."""
    table: SwapTable = {}
    if torch.device(config.device).type == "cpu":
        from engine.cpu.module_replacements import register

        register(table)
    return table
