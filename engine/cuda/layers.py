"""Norms and gated MLPs over FlashInfer's operators, for the layers that engine/cuda/decoder.py does not
compute whole.

transformers' norm is six operators, and its MLP is two products and two operators where one product and one
operator do. Rotary embeddings and the projections of attention stay transformers' there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.cuda.stored_product import Products
from engine.parallel.sums import SummedLinear

NORMS = (
    "AXK1RMSNorm",
    "AfmoeRMSNorm",
    "ApertusRMSNorm",
    "ArceeRMSNorm",
    "CwmRMSNorm",
    "DeepseekV2RMSNorm",
    "DeepseekV32RMSNorm",
    "DeepseekV3RMSNorm",
    "Dots1RMSNorm",
    "Ernie4_5RMSNorm",
    "Ernie4_5_MoeRMSNorm",
    "Exaone4RMSNorm",
    "ExaoneMoeRMSNorm",
    "FalconH1RMSNorm",
    "Gemma4RMSNorm",
    "Gemma4UnifiedRMSNorm",
    "Glm4MoeLiteRMSNorm",
    "Glm4MoeRMSNorm",
    "Glm4RMSNorm",
    "GlmMoeDsaRMSNorm",
    "GptOssRMSNorm",
    "GraniteMoeHybridRMSNorm",
    "GraniteMoeRMSNorm",
    "GraniteMoeSWARMSNorm",
    "GraniteMoeSharedRMSNorm",
    "GraniteRMSNorm",
    "GraniteSWARMSNorm",
    "HYV3RMSNorm",
    "HyperCLOVAXRMSNorm",
    "Kolibri1RMSNorm",
    "LagunaRMSNorm",
    "Lfm2MoeRMSNorm",
    "Lfm2RMSNorm",
    "Lfm3RMSNorm",
    "MellumRMSNorm",
    "MiniMaxM2RMSNorm",
    "Ministral3RMSNorm",
    "Mistral4RMSNorm",
    "Olmo2RMSNorm",
    "Olmo3RMSNorm",
    "OlmoeRMSNorm",
    "Phi3RMSNorm",
    "SmolLM3RMSNorm",
    "SolarOpenRMSNorm",
    "YoutuRMSNorm",
)
"""transformers' norms that multiply by their weight. Some of Gemma 4's have none, and stay."""

NORMS_PLUS_ONE = (
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "GemmaRMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5MoeRMSNorm",
    "Qwen3_5RMSNorm",
)
"""transformers' norms that multiply by their weight plus one."""

MLPS = (
    "AXK1MLP",
    "AfmoeMLP",
    "Cohere2MLP",
    "CwmMLP",
    "DeepseekV2MLP",
    "DeepseekV32MLP",
    "DeepseekV3MLP",
    "Dots1MLP",
    "Ernie4_5MLP",
    "Ernie4_5_MoeMLP",
    "Exaone4MLP",
    "ExaoneMoeMLP",
    "Gemma2MLP",
    "Gemma3MLP",
    "Gemma4TextMLP",
    "Gemma4UnifiedTextMLP",
    "GemmaMLP",
    "Glm4MoeLiteMLP",
    "Glm4MoeMLP",
    "GlmMoeDsaMLP",
    "GraniteMLP",
    "GraniteSWAMLP",
    "HYV3MLP",
    "HyperCLOVAXMLP",
    "Kolibri1MLP",
    "LagunaMLP",
    "MellumMLP",
    "Ministral3MLP",
    "Mistral4MLP",
    "Olmo2MLP",
    "Olmo3MLP",
    "Qwen2MoeMLP",
    "Qwen3NextMLP",
    "Qwen3_5MLP",
    "Qwen3_5MoeMLP",
    "SmolLM3MLP",
    "SolarOpenMLP",
    "YoutuMLP",
)
"""transformers' modules down(act(gate(x)) * up(x)) without biases."""

_GATES = {"SiLUActivation": "silu_and_mul", "SiLU": "silu_and_mul", "GELUTanh": "gelu_tanh_and_mul"}


class FlashInferNorm(nn.Module):
    """Replaces one of NORMS or NORMS_PLUS_ONE. Its sums and its product with the weight are float32."""

    def __init__(self, norm: Any) -> None:
        """Raises ImportError if FlashInfer is not installed."""
        super().__init__()
        import flashinfer

        plus_one = type(norm).__name__ in NORMS_PLUS_ONE
        self._operator: Any = flashinfer.gemma_rmsnorm if plus_one else flashinfer.rmsnorm
        self.weight = norm.weight
        self._eps = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        result: torch.Tensor = self._operator(rows, self.weight, self._eps)
        return result.view(x.shape)


class FlashInferMLP(nn.Module):
    """Replaces a gated MLP without biases. The weights of gate and up are joined."""

    def __init__(self, mlp: Any, products: Products | None = None) -> None:
        """Raises ImportError if FlashInfer is not installed."""
        super().__init__()
        import flashinfer

        products = products or Products()
        gate = _GATES[type(mlp.act_fn).__name__]
        self.is_silu = gate == "silu_and_mul"
        self._gate: Any = getattr(flashinfer, gate)
        gate_up = torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()))
        self.gate_up, self.down = products.of(gate_up), products.of(mlp.down_proj.weight)
        self._summed = mlp.down_proj if isinstance(mlp.down_proj, SummedLinear) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same shape."""
        out = self.down(self._gate(self.gate_up(x)))
        return out if self._summed is None else self._summed.finished(out)


class StoredLinear(nn.Module):
    """Replaces a linear layer whose weight stays stored."""

    def __init__(self, linear: nn.Linear, products: Products) -> None:
        super().__init__()
        self._product = products.of(linear.weight)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self._product(x, self.bias)


def has_weight(norm: Any) -> bool:
    """Whether FlashInferNorm computes the same as this module."""
    return getattr(norm, "weight", None) is not None


def fusible_mlp(mlp: Any) -> bool:
    """Whether FlashInferMLP computes the same as this module."""
    projections = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return type(mlp.act_fn).__name__ in _GATES and all(part.bias is None for part in projections)
