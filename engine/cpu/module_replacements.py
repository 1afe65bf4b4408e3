"""Which transformers modules the CPU kernels replace (engine/module_replacements.py: apply_replacements).

In bfloat16 only: in float32 transformers' own modules stay, so that greedy tokens are exactly theirs, and the
attention op alone is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.errors import ConfigError
from engine.cpu import experts
from engine.cpu.decoder import MODELS, FusedDecoder, fusible
from engine.cpu.linear import PackedLinear, check_packable, packable
from engine.cpu.op import KernelsUnavailable

if TYPE_CHECKING:
    from engine.config import EngineConfig


def register(table: dict[str, Callable[[nn.Module, EngineConfig], nn.Module | None]]) -> None:
    """Add the CPU's replacements, for one model."""
    replacements = CpuReplacements()
    for name in MODELS:
        table[name] = replacements.decoder
    for name in experts.MODELS:
        table[name] = replacements.experts
    table["Linear"] = replacements.linear


class CpuReplacements:
    """The replacements of one model, in the order in which apply_replacements meets its modules."""

    def __init__(self) -> None:
        self._fused = False

    def decoder(self, model: nn.Module, config: EngineConfig) -> nn.Module | None:
        """The whole decoder, where the C++ attention op can serve it."""
        if not _packs(config) or config.attention not in ("auto", "cpu") or not fusible(model):
            return None
        self._fused = True
        return FusedDecoder(model)

    def experts(self, module: nn.Module, config: EngineConfig) -> nn.Module | None:
        """The experts of one mixture."""
        if not _packs(config) or not experts.fusible(module):
            return None
        return experts.PackedExperts(module)

    def linear(self, linear: nn.Module, config: EngineConfig) -> nn.Module | None:
        """A linear layer that the decoder's swap left. Behind a fused decoder that is the one onto the
        vocabulary, and its sums stay float32: rounding logits to bfloat16 makes ties."""
        assert isinstance(linear, nn.Linear)
        if not packable(linear.weight) or not _packs(config):
            return None
        return PackedLinear(linear, torch.float32 if self._fused else torch.bfloat16)


def _packs(config: EngineConfig) -> bool:
    """Whether weights are packed at all. Raises ConfigError if the config insists and this CPU cannot."""
    if config.linear == "torch":
        return False
    try:
        check_packable()
    except KernelsUnavailable as error:
        if config.linear == "packed":
            raise ConfigError(
                "engine.linear", f"'packed' cannot run: {error}", "use auto or torch"
            ) from error
        return False
    return True
