"""The transformers modules that the CPU kernels replace (engine/replacement_table.py: apply_replacements).

They replace modules in bfloat16 only. In float32 transformers' own modules stay and only the attention is
ours, so that greedy tokens equal those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.errors import ConfigError
from engine.cpu import delta_net, experts, grouped_linear, mamba2, norm
from engine.cpu.decoder import FusedDecoder, fusible
from engine.cpu.linear import PackedEmbedding, PackedLinear, Packer, check_packable, packable
from engine.cpu.op import KernelsUnavailable
from engine.cpu.router import holder_of_weight, pack_router
from engine.decoder_parts import DECODERS
from engine.delta_forms import DELTA_NETS
from engine.kv_sharing import Gemma4Decoder
from engine.layer_classes import EXPERTS, NORMS, NORMS_PLUS_ONE, ROUTERS, UNGATED_EXPERTS
from engine.mamba2_forms import MAMBA2
from engine.replacement_table import ReplacementTable, apply_replacements

if TYPE_CHECKING:
    from engine.config import EngineConfig


def register(table: dict[str, Callable[[nn.Module, EngineConfig], nn.Module | None]], kept: set[str]) -> None:
    """Add the CPU's replacements, for one model. They add to `kept` the names of stored formats they take."""
    table |= CpuReplacements(kept).table


def check_packs(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raises ConfigError if weights in `dtype` cannot be packed as `config.weight_dtype` here. Loading
    without int8 instead would serve a model of twice the size that was asked for."""
    wanted = config.weight_dtype
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            "weight_dtype", f"{wanted} is made of bfloat16, not of {name}", "use dtype bfloat16"
        )
    if config.linear == "torch":
        raise ConfigError(
            "weight_dtype",
            f"torch's linear layers have no {wanted} packs",
            "use linear auto or packed",
        )
    try:
        check_packable()
    except KernelsUnavailable as error:
        raise ConfigError("weight_dtype", f"{wanted} cannot run: {error}", "use auto") from error


class CpuReplacements:
    """The replacements of one model. apply_replacements calls the methods for outer modules first."""

    def __init__(self, kept: set[str] | None = None) -> None:
        self._kept = kept
        self._fused: FusedDecoder | None = None
        self.table: ReplacementTable = {
            **dict.fromkeys(DECODERS, self.decoder),
            "Gemma4Decoder": self.sharing_decoder,
            **dict.fromkeys((*EXPERTS, *UNGATED_EXPERTS), self.experts),
            **dict.fromkeys((*NORMS, *NORMS_PLUS_ONE), self.norm),
            **dict.fromkeys(ROUTERS, self.router),
            **dict.fromkeys(DELTA_NETS, self.delta_net),
            **dict.fromkeys(MAMBA2, self.mamba2),
            "DeepseekV4GroupedLinear": self.grouped,
            "Linear": self.linear,
        }

    def decoder(self, model: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace the whole decoder, if the C++ attention op can serve it, and what is left of its MLPs."""
        if not packs(config) or config.attention not in ("auto", "cpu") or not fusible(model):
            return None
        fused = FusedDecoder(model, self._packer(config))
        for outside in filter(None, (fused.outside, fused.layer_inputs)):
            apply_replacements(outside, config, self.table)
        self._fused = fused
        return fused

    def sharing_decoder(self, ours: nn.Module, config: EngineConfig) -> nn.Module | None:
        """The same of a decoder whose layers may share keys and values."""
        assert isinstance(ours, Gemma4Decoder)
        return self.decoder(ours.decoder, config)

    def experts(self, module: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace the experts of one mixture."""
        if not packs(config) or not experts.fusible(module):
            return None
        return experts.PackedExperts(module, self._packer(config))

    def norm(self, module: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace a norm that no fused decoder has."""
        return norm.CpuNorm(module) if packs(config) and norm.fusible(module) else None

    def router(self, module: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Pack the weight of one router, which stays itself."""
        if not packs(config) or not packable(holder_of_weight(module).weight):
            return None
        pack_router(module)
        return module

    def delta_net(self, mixer: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Pack the projections of one gated delta net, and replace what is between them."""
        if not packs(config) or not delta_net.fusible(mixer):
            return None
        self._pack_projections(mixer, config)
        return delta_net.DeltaNet(mixer)

    def mamba2(self, mixer: nn.Module, config: EngineConfig) -> nn.Module | None:
        """The same of one Mamba-2 layer."""
        if not packs(config) or not mamba2.fusible(mixer):
            return None
        self._pack_projections(mixer, config)
        return mamba2.Mamba2(mixer)

    def _pack_projections(self, mixer: nn.Module, config: EngineConfig) -> None:
        for part in list(mixer.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear) and (packed := self.linear(child, config)) is not None:
                    setattr(part, name, packed)

    def grouped(self, linear: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace DeepSeek-V4's projection of groups of heads."""
        if not packs(config) or not grouped_linear.fusible(linear):
            return None
        return grouped_linear.PackedGroups(linear, self._packer(config))

    def linear(self, linear: nn.Module, config: EngineConfig) -> nn.Module | None:
        """Replace a linear layer outside a fused decoder.

        After a fused decoder this is the projection onto the vocabulary. Its sums stay float32, because
        rounding logits to bfloat16 makes ties. If its weights are the embedding's, they are held once.
        """
        assert isinstance(linear, nn.Linear)
        if not packable(linear.weight) or not packs(config):
            return None
        if self._fused is None:
            return PackedLinear(linear, torch.bfloat16, self._packer(config))
        packed = PackedLinear(linear, torch.float32, self._packer(config))
        if self._fused.embed_tokens.weight is linear.weight:
            self._fused.embed_tokens = PackedEmbedding(packed.pack)
        return packed

    def _packer(self, config: EngineConfig) -> Packer:
        return Packer(config.weight_dtype, self._kept)


def packs(config: EngineConfig) -> bool:
    """Whether weights are packed. Raises ConfigError if the config requires it and this CPU cannot do it."""
    if config.linear == "torch":
        return False
    try:
        check_packable()
    except KernelsUnavailable as error:
        if config.linear == "packed":
            raise ConfigError(
                "linear_backend", f"'packed' cannot run: {error}", "use auto or torch"
            ) from error
        return False
    return True
