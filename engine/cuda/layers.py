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
from engine.decoder_parts import gate_and_up, is_gated, norm_eps
from engine.layer_classes import NORMS_PLUS_ONE
from engine.parallel.sums import SummedLinear

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
        self._eps = norm_eps(norm)

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
        gate = _GATES[_activation(mlp)]
        self.is_silu = gate == "silu_and_mul"
        self._gate: Any = getattr(flashinfer, gate)
        gate_up = torch.cat([part.detach() for part in gate_and_up(mlp)])
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
    return is_gated(mlp) and _activation(mlp) in _GATES


def _activation(mlp: Any) -> str:
    """The class of the activation of its gates. Phi 3 calls it otherwise."""
    return type(mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn).__name__
