"""Replaces slow modules after loading with faster modules that compute the same.

The table maps the class name of a transformers module to a function that returns its replacement, or None to
keep this instance. In float32 no replacement may change a greedy token. Each replacement has a test that
compares it with the original module.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

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
