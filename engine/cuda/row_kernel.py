"""A Triton kernel for the products of one row: it reads each weight once, and does the norm before a product,
the activation or the sum after it on the way.

From compute capability 9.0 on it starts while the kernel before it runs ("programmatic dependent launch" in
CUDA's manual): its first weights are in registers when its row is there. To ask for all of them with
`prefetch.global.L2` was tried on an H200 and made it slower: 616 us instead of 582 for 112 products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.triton_kernels import early_launch

_OUTPUTS, _MOST_INPUTS = 4, 2048
"""Of the weights that a program holds in its registers at a time. On an H200 the products of an 8B model take
3,436 us so, and 3,660 to 4,170 with other sizes."""


def launch(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    add: bool,
    eps: float,
) -> None:
    """As row_product.py: row_product."""
    inputs, outputs = x.shape[1], out.shape[1]
    options = tile_options(inputs, gated)
    row_product_kernel[(triton.cdiv(outputs, options["OUTPUTS"]),)](
        x, norm, weight, bias, out, outputs, eps,
        INPUTS=inputs, NORM=norm is not None, BIAS=bias is not None, GATED=gated, ADD=add,
        **options, **early_launch(x.device),
    )  # fmt: skip


def tile_options(inputs: int, gated: bool) -> dict[str, int]:
    """The sizes of a program's tile, and the warps that compute it."""
    part = min(_MOST_INPUTS, 1 << (inputs - 1).bit_length())
    return {"OUTPUTS": _OUTPUTS // 2 if gated else _OUTPUTS, "PART": part, "num_warps": 4}


@triton.jit
def row_product_kernel(
    x, norm, weight, bias, out, outputs, eps,
    INPUTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    OUTPUTS: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As row_product.py: row_product. A program computes OUTPUTS outputs, from PART inputs at a time."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    place = tl.minimum(output, outputs - 1).to(tl.int64)[:, None]
    matrix = weight + place * INPUTS
    up_matrix = weight + (place + outputs) * INPUTS
    each = tl.arange(0, PART)
    some = each < INPUTS
    if EARLY:
        gdc_launch_dependents()
    part = tl.load(matrix + each[None, :], mask=some[None, :], other=0.0)
    if GATED:
        up = tl.load(up_matrix + each[None, :], mask=some[None, :], other=0.0)
    if NORM:
        gain = tl.load(norm + each, mask=some, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    inputs = tl.load(x + each, mask=some, other=0.0).to(tl.float32)
    squares = 0.0
    if NORM:
        squares += tl.sum(inputs * inputs, 0)
        inputs *= gain
    sums = tl.sum(part.to(tl.float32) * inputs[None, :], 1)
    if GATED:
        ups = tl.sum(up.to(tl.float32) * inputs[None, :], 1)
    for first in tl.static_range(PART, INPUTS, PART):
        some = first + each < INPUTS
        part = tl.load(matrix + first + each[None, :], mask=some[None, :], other=0.0)
        if GATED:
            up = tl.load(up_matrix + first + each[None, :], mask=some[None, :], other=0.0)
        inputs = tl.load(x + first + each, mask=some, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(inputs * inputs, 0)
            inputs *= tl.load(norm + first + each, mask=some, other=0.0).to(tl.float32)
        sums += tl.sum(part.to(tl.float32) * inputs[None, :], 1)
        if GATED:
            ups += tl.sum(up.to(tl.float32) * inputs[None, :], 1)
    if NORM:
        factor = tl.rsqrt(squares / INPUTS + eps)
        sums *= factor
        if GATED:
            ups *= factor
    if BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    if ADD:
        sums += tl.load(out + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, sums.to(out.dtype.element_ty), mask=is_output)
