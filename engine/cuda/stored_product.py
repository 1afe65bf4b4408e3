"""Products with weights that stay as the checkpoint stored them, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from engine.checkpoint.stored import StoredTensor
from engine.cuda import triton_kernels
from engine.cuda.coded_weights import FORMATS, CodedWeights


class Product(Protocol):
    """x [rows, inputs] -> [rows, outputs]."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


class Products:
    """Makes the products of one model."""

    def __init__(self, kept: set[str] | None = None) -> None:
        """Weights that stay stored add the name of their format to `kept`."""
        self._kept = set() if kept is None else kept

    def of(self, weight: torch.Tensor) -> Product:
        """The product with a weight [outputs, inputs]."""
        stored = self.stored(weight)
        if stored is not None:
            return stored
        return DenseProduct(weight.dequantised() if isinstance(weight, StoredTensor) else weight)

    def stored(self, weight: torch.Tensor) -> StoredProduct | None:
        """The product with one matrix, or one for each expert, if it can stay stored."""
        if not isinstance(weight, StoredTensor) or not triton_kernels.available():
            return None
        parts = [part for rows in weight.matrices for part in rows]
        for form, read in FORMATS:
            found = [read(part) for part in parts]
            made = [each for each in found if each is not None]
            if len(made) == len(parts):
                self._kept.add(form)
                return StoredProduct(CodedWeights.joined(made, len(weight.matrices)))
        return None


@dataclass(frozen=True)
class DenseProduct:
    """A Product with a weight [outputs, inputs] in the dtype of x."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return linear(x, self.weight, bias)


class StoredProduct:
    """A Product, also one with several experts' weights."""

    def __init__(self, weights: CodedWeights) -> None:
        self._weights = weights

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = stored_product(rows, *self._weights, None, None, 1, len(rows))
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def by_expert(
        self, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor, divisor: int, count: int
    ) -> torch.Tensor:
        """The products of rows with the weights of their experts: [count, outputs]. See stored_product."""
        out: torch.Tensor = stored_product(x, *self._weights, rows, experts, divisor, count)
        return out


@torch.library.custom_op("baton::stored_product", mutates_args=())
def stored_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    factors: torch.Tensor | None,
    rows: torch.Tensor | None,
    experts: torch.Tensor | None,
    divisor: int,
    count: int,
) -> torch.Tensor:
    """[count, outputs] in the dtype of x [n, inputs]; weights as in CodedWeights.

    Weights of 4 bits are rounded to the dtype of x; scales of fp8 and factors of NVFP4 are multiplied with
    float32 sums.

    Without `rows` result i is of row i, with the only weights there are. Else `rows`, int32, are places of
    the result in tiles of equal size, -1 for none, and `experts`, int32, has the expert of each tile, or -1.
    Result i is then of row i / divisor, rounded down.
    """
    from engine.cuda.stored_kernel import launch

    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(count, codes.shape[1])
    if count:
        launch(x, CodedWeights(codes, scales, zeros, factors), rows, experts, divisor, out)
    return out


@stored_product.register_fake
def _shape(x: torch.Tensor, codes: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, count = rest
    return x.new_empty(count, codes.shape[1])


@stored_product.register_kernel("cpu")
def _reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    factors: torch.Tensor | None,
    rows: torch.Tensor | None,
    experts: torch.Tensor | None,
    divisor: int,
    count: int,
) -> torch.Tensor:
    """By its definition: tests compare the kernel with it, and run models on a CPU with it."""
    if rows is None or experts is None:
        rows, experts = torch.arange(count)[None], torch.zeros(1)
    whole = CodedWeights(codes, scales, zeros, factors)
    out = x.new_zeros(count, codes.shape[1])
    for expert, tile in zip(experts.tolist(), rows.view(len(experts), -1), strict=True):
        some = tile[tile >= 0].long()
        if expert >= 0 and len(some):
            weight = whole.of_expert(int(expert)).widened(x.dtype)
            out[some] = (x[some // divisor].float() @ weight.T).to(x.dtype)
    return out
