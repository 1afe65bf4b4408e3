"""Products of one row with a layer's weights: on CUDA a Triton kernel, elsewhere its definition, with which
tests compare the kernel and run models on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu


@torch.library.custom_op("baton::row_product", mutates_args=("out",))
def row_product(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    add: bool,
    eps: float,
) -> None:
    """out [1, outputs] = x [1, inputs] times weight [outputs, inputs]. Sums are float32, rounded once.

    `norm` [inputs]: RMSNorm of x before the product. `bias` [outputs] is added. `gated`: weight is
    [2 outputs, inputs], and the result is silu(first half) * second half. `add`: the result is added to what
    `out` holds.
    """
    from engine.cuda.row_kernel import launch

    launch(x, norm, weight, bias, out, gated, add, eps)


@row_product.register_fake
def _nothing(*_: Any) -> None:
    return None


@row_product.register_kernel("cpu")
def _reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    add: bool,
    eps: float,
) -> None:
    """By its definition."""
    wide = x.float()
    if norm is not None:
        wide = rms_norm(wide, x.shape[-1:], norm.float(), eps)
    sums = linear(wide, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = sums.chunk(2, dim=-1)
        sums = silu(gate) * up
    out.copy_(sums + out.float() if add else sums)
