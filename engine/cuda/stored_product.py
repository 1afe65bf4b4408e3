"""Products with weights that stay as the checkpoint stored them, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from engine.checkpoint.mxfp4 import Mxfp4Matrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredMatrix, StoredTensor

SCALE_INPUTS = 128
"""The inputs of an output that share a scale of fp8 (stored_kernel.py)."""


def has_kernels() -> bool:
    """Whether Triton, which torch for CUDA brings along, is installed."""
    return importlib.util.find_spec("triton") is not None


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
        return partial(_dense, weight.dequantised() if isinstance(weight, StoredTensor) else weight)

    def stored(self, weight: torch.Tensor) -> StoredProduct | None:
        """The product with one matrix, or one for each expert, if it can stay stored."""
        if not isinstance(weight, StoredTensor) or not has_kernels():
            return None
        parts = [part for rows in weight.matrices for part in rows]
        for form, read in (("fp8", _fp8), ("mxfp4", _mxfp4)):
            found = [read(part) for part in parts]
            codes, scales = ([pair[i] for pair in found if pair is not None] for i in (0, 1))
            if len(codes) == len(parts):
                self._kept.add(form)
                return StoredProduct(_by_expert(codes, weight), _by_expert(scales, weight))
        return None


class StoredProduct:
    """A Product, also one with several experts' weights.

    fp8: codes uint8 [experts, outputs, inputs], float32 scales [experts, outputs, inputs / 128 rounded up].
    MXFP4: codes uint8 [experts, outputs, inputs / 2], powers uint8 [experts, outputs, inputs / 32].
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self._codes = codes
        self._scales = scales

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = stored_product(rows, self._codes, self._scales, None, None, 1, len(rows))
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def by_expert(
        self, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor, divisor: int, count: int
    ) -> torch.Tensor:
        """The products of rows with the weights of their experts: [count, outputs]. See stored_product."""
        out: torch.Tensor = stored_product(x, self._codes, self._scales, rows, experts, divisor, count)
        return out


@torch.library.custom_op("baton::stored_product", mutates_args=())
def stored_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor | None,
    experts: torch.Tensor | None,
    divisor: int,
    count: int,
) -> torch.Tensor:
    """[count, outputs] in the dtype of x [n, inputs]; weights as in StoredProduct.

    Without `rows` result i is of row i, with the only weights there are. Else `rows`, int32, are places of
    the result in tiles of equal size, -1 for none, and `experts`, int32, has the expert of each tile, or -1.
    Result i is then of row i / divisor, rounded down.
    """
    from engine.cuda.stored_kernel import launch

    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(count, codes.shape[1])
    if count:
        launch(x, codes, scales, rows, experts, divisor, out, SCALE_INPUTS)
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
    rows: torch.Tensor | None,
    experts: torch.Tensor | None,
    divisor: int,
    count: int,
) -> torch.Tensor:
    """By its definition: tests compare the kernel with it, and run models on a CPU with it."""
    if rows is None or experts is None:
        rows, experts = torch.arange(count)[None], torch.zeros(1)
    out = x.new_zeros(count, codes.shape[1])
    for expert, tile in zip(experts.tolist(), rows.view(len(experts), -1), strict=True):
        some = tile[tile >= 0].long()
        if expert >= 0 and len(some):
            weight = _widened(codes[int(expert)], scales[int(expert)])
            out[some] = (x[some // divisor].float() @ weight.T).to(x.dtype)
    return out


def _widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 [outputs, inputs]."""
    if scales.dtype == torch.float32:
        inputs = codes.shape[1]
        matrix: StoredMatrix = ScaledMatrix(
            codes.view(torch.float8_e4m3fn), scales, (1, min(SCALE_INPUTS, inputs))
        )
    else:
        matrix = Mxfp4Matrix(codes.view(*scales.shape, 16), scales)
    weight = torch.empty(matrix.shape)
    matrix.dequantise(weight)
    return weight


def _dense(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x, weight, bias)


def _fp8(matrix: StoredMatrix) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not isinstance(matrix, ScaledMatrix) or matrix.numbers.dtype != torch.float8_e4m3fn:
        return None
    scales = matrix.input_scales(SCALE_INPUTS)
    return None if scales is None else (matrix.numbers.view(torch.uint8), scales)


def _mxfp4(matrix: StoredMatrix) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (matrix.codes.flatten(1), matrix.scales) if isinstance(matrix, Mxfp4Matrix) else None


def _by_expert(parts: Sequence[torch.Tensor], weight: StoredTensor) -> torch.Tensor:
    """[experts, outputs, ...] of the parts of all experts, one expert after the other."""
    whole = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0].contiguous()
    return whole.view(len(weight.matrices), -1, whole.shape[-1])
