"""Products with weights that stay in 8 or 4 bits: a Triton kernel that widens tiles of them in registers.

A program multiplies ROWS rows with OUTPUTS outputs of one expert's weights. Codes become numbers by
arithmetic on integers: the GPU's own conversions have fp8 from compute capability 8.9 on only. Sums are
float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.cuda.tiles import tile_rows


def launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor | None,
    experts: torch.Tensor | None,
    divisor: int,
    out: torch.Tensor,
    scale_inputs: int,
) -> None:
    """As stored_product.py: stored_product, into `out`. So many inputs share a scale of fp8."""
    fp8 = scales.dtype == torch.float32
    inputs, outputs = x.shape[1], codes.shape[1]
    if rows is None or experts is None:
        row_tile = tile_rows(len(x))
        row_tiles = triton.cdiv(len(x), row_tile)
    else:
        row_tiles = len(experts)
        row_tile = len(rows) // row_tiles
    options = tile_options(row_tile)
    stored_product_kernel[(triton.cdiv(outputs, options["OUTPUTS"]), row_tiles)](
        x, codes, scales, rows, experts, out, len(x), inputs, outputs, x.stride(0), divisor,
        SCALE_INPUTS=scale_inputs, FP8=fp8, GROUPED=rows is not None, ROWS=row_tile, **options,
    )  # fmt: skip


def tile_options(rows: int) -> dict[str, Any]:
    """The other sizes of tiles of so many rows, and the warps that compute one."""
    if rows <= 32:
        return {"OUTPUTS": 32, "INPUTS": 128, "num_warps": 4, "num_stages": 4}
    return {"OUTPUTS": 64, "INPUTS": 64, "num_warps": 4 if rows <= 64 else 8, "num_stages": 3}


@triton.jit
def stored_product_kernel(
    x, codes, scales, rows, experts, out, row_count, inputs, outputs, x_stride, divisor,
    SCALE_INPUTS: tl.constexpr, FP8: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row // divisor] times the expert's weights."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    weights = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = weights < outputs
    if GROUPED:
        expert = tl.load(experts + tl.program_id(1))
        if expert < 0:
            return
        row = tl.load(rows + row)
        is_row = row >= 0
        matrix = expert.to(tl.int64) * outputs + weights
    else:
        is_row = row < row_count
        matrix = weights.to(tl.int64)
    left = x + (row // divisor).to(tl.int64)[:, None] * x_stride
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    if FP8:
        each = tl.arange(0, INPUTS)
        right = codes + matrix[:, None] * inputs
        factors = scales + matrix * tl.cdiv(inputs, SCALE_INPUTS)
        for first in range(0, inputs, INPUTS):
            place = (first + each)[None, :]
            some = place < inputs
            a = tl.load(left + place, mask=is_row[:, None] & some, other=0.0)
            code = tl.load(right + place, mask=is_output[:, None] & some, other=0)
            factor = tl.load(factors + first // SCALE_INPUTS, mask=is_output, other=0.0)
            sums += tl.dot(a, tl.trans(e4m3(code).to(a.dtype))) * factor[None, :]
    else:
        pair = tl.arange(0, INPUTS // 2)
        right = codes + matrix[:, None] * (inputs // 2)
        powers = scales + matrix[:, None] * (inputs // 32)  # one for each 16 pairs
        for first in range(0, inputs // 2, INPUTS // 2):
            place = (first + pair)[None, :]
            some = place < inputs // 2
            even = tl.load(left + 2 * place, mask=is_row[:, None] & some, other=0.0)
            odd = tl.load(left + 2 * place + 1, mask=is_row[:, None] & some, other=0.0)
            code = tl.load(right + place, mask=is_output[:, None] & some, other=0)
            power = power_of_two(tl.load(powers + place // 16, mask=is_output[:, None] & some, other=127))
            low, high = (e2m1(code & 15) * power).to(even.dtype), (e2m1(code >> 4) * power).to(even.dtype)
            sums += tl.dot(even, tl.trans(low)) + tl.dot(odd, tl.trans(high))
    place = row.to(tl.int64)[:, None] * outputs + weights[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def e4m3(code):
    """The float32 of a code: 4 bits of exponent with bias 7, 3 of mantissa. 127 is NaN."""
    size = (code & 127).to(tl.int32)
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # below 8: multiples of 2^-9
    number = tl.where(size == 127, float("nan"), number)
    return tl.where(code > 127, -number, number)


@triton.jit
def e2m1(code):
    """The float32 of a code: 2 bits of exponent with bias 1, 1 of mantissa."""
    size = (code & 7).to(tl.int32)
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(code > 7, -number, number)


@triton.jit
def power_of_two(code):
    """The float32 of an E8M0 code: 2^(code - 127). 255 is NaN."""
    power = code.to(tl.int32)
    bits = tl.where(power == 0, 1 << 22, power << 23)  # 2^-127 has no exponent of its own
    return tl.where(power == 255, float("nan"), bits.to(tl.float32, bitcast=True))
