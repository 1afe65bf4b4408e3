"""The transformers modules that the CPU kernels replace (engine/module_replacements.py: apply_replacements).

They replace modules in bfloat16 only. In float32 transformers' own modules stay and only the attention is
ours, so that greedy tokens equal those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.errors import ConfigError
from engine.cpu import delta_net, experts
from engine.cpu.decoder import MODELS, FusedDecoder, fusible
from engine.cpu.linear import PackedEmbedding, PackedLinear, check_packable, packable
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
    for name in delta_net.MODELS:
        table[name] = replacements.delta_net
    table["Linear"] = replacements.linear


def check_int8(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raises ConfigError if weights in `dtype` cannot be packed as int8 here. Loading without them instead
    would serve a model of twice the size that was asked for."""
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            "engine.weight_dtype", f"int8 is made of bfloat16, not of {name}", "use dtype bfloat16"
        )
    if config.linear == "torch":
        raise ConfigError(
            "engine.weight_dtype", "torch's linear layers have no int8", "use linear auto or packed"
        )
    try:
        check_packable()
    except KernelsUnavailable as error:
        raise ConfigError("engine.weight_dtype", f"int8 cannot run: {error}", "use auto") from error


class CpuReplacements:
    """The replacements of one model. apply_replacements calls the methods for outer modules first."""

    def __init__(self) -> None:
        self._fused: FusedDecoder | None = None

    def decoder(self, model: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace the whole decoder, if the C++ attention op can serve it."""
        if not _packs(config) or config.attention not in ("auto", "cpu") or not fusible(model):
            return None
        self._fused = FusedDecoder(model, _weight_dtype(config))
        return self._fused

    def experts(self, module: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace the experts of one mixture."""
        if not _packs(config) or not experts.fusible(module):
            return None
        return experts.PackedExperts(module, _weight_dtype(config))

    def delta_net(self, mixer: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Pack the projections of one gated delta net, and replace its decode steps."""
        if not _packs(config) or not delta_net.fusible(mixer):
            return None
        for name, child in list(mixer.named_children()):
            if isinstance(child, nn.Linear) and (packed := self.linear(child, config)) is not None:
                setattr(mixer, name, packed)
        return delta_net.DeltaNet(mixer)

    def linear(self, linear: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace a linear layer outside a fused decoder.

        After a fused decoder this is the projection onto the vocabulary. Its sums stay float32, because
        rounding logits to bfloat16 makes ties. If its weights are the embedding's, they are held once.
        """
        assert isinstance(linear, nn.Linear)
        if not packable(linear.weight) or not _packs(config):
            return None
        if self._fused is None:
            return PackedLinear(linear, torch.bfloat16, _weight_dtype(config))
        packed = PackedLinear(linear, torch.float32, _weight_dtype(config))
        if self._fused.embed_tokens.weight is linear.weight:
            self._fused.embed_tokens = PackedEmbedding(packed.pack)
        return packed


def _weight_dtype(config: EngineConfig) -> torch.dtype:
    return torch.int8 if config.weight_dtype == "int8" else torch.bfloat16


def _packs(config: EngineConfig) -> bool:
    """Whether weights are packed. Raises ConfigError if the config requires it and this CPU cannot do it."""
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
