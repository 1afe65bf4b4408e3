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

from engine.cuda.coded_weights import CodedWeights
from engine.cuda.tiles import tile_rows


def launch(
    x: torch.Tensor,
    weights: CodedWeights,
    rows: torch.Tensor | None,
    experts: torch.Tensor | None,
    divisor: int,
    out: torch.Tensor,
) -> None:
    """As stored_product.py: stored_product, into `out`."""
    inputs, outputs = x.shape[1], weights.codes.shape[1]
    if rows is None or experts is None:
        row_tile = tile_rows(len(x))
        row_tiles = triton.cdiv(len(x), row_tile)
    else:
        row_tiles = len(experts)
        row_tile = len(rows) // row_tiles
    options = {
        "SCALE_INPUTS": weights.scale_inputs(inputs),
        "FORMAT": weights.form,
        "GROUPED": rows is not None,
        "ROWS": row_tile,
        **tile_options(row_tile),
    }
    stored_product_kernel[(triton.cdiv(outputs, options["OUTPUTS"]), row_tiles)](
        x, *weights, rows, experts, out, len(x), inputs, outputs, x.stride(0), divisor,
        **options,
    )  # fmt: skip


def tile_options(rows: int) -> dict[str, Any]:
    """The other sizes of tiles of so many rows, and the warps that compute one."""
    if rows <= 32:
        return {"OUTPUTS": 32, "INPUTS": 128, "num_warps": 4, "num_stages": 4}
    return {"OUTPUTS": 64, "INPUTS": 64, "num_warps": 4 if rows <= 64 else 8, "num_stages": 3}


@triton.jit(do_not_specialize=["row_count"])  # else it is compiled again for multiples of 16, and for 1
def stored_product_kernel(
    x, codes, scales, zeros, factors, rows, experts, out, row_count, inputs, outputs, x_stride, divisor,
    SCALE_INPUTS: tl.constexpr, FORMAT: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr,
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
    scales_of_output = tl.cdiv(inputs, SCALE_INPUTS)
    if FORMAT == "fp8":
        each = tl.arange(0, INPUTS)
        right = codes + matrix[:, None] * inputs
        of_output = scales + matrix * scales_of_output
        for first in range(0, inputs, INPUTS):
            place = (first + each)[None, :]
            some = place < inputs
            a = tl.load(left + place, mask=is_row[:, None] & some, other=0.0)
            code = tl.load(right + place, mask=is_output[:, None] & some, other=0)
            factor = tl.load(of_output + first // SCALE_INPUTS, mask=is_output, other=0.0)
            sums += tl.dot(a, tl.trans(e4m3(code).to(a.dtype))) * factor[None, :]
    else:
        PAIRS: tl.constexpr = INPUTS // 2
        BOTH: tl.constexpr = SCALE_INPUTS == 16  # halves of a byte have scales of their own
        SCALES: tl.constexpr = max(1, INPUTS // SCALE_INPUTS) // (2 if BOTH else 1)
        pair = tl.arange(0, PAIRS)
        lower = (
            pair // 16 * 32 + pair % 16
        )  # the input of a byte's lower half; that of the upper is 16 further
        right = codes + matrix[:, None] * (inputs // 2)
        of_output = matrix[:, None] * scales_of_output
        for first in range(0, inputs, INPUTS):
            place = (first + lower)[None, :]
            some = is_row[:, None] & (place < inputs)
            a = tl.load(left + place, mask=some, other=0.0)
            b = tl.load(left + place + 16, mask=some, other=0.0)
            place = (first // 2 + pair)[None, :]
            code = tl.load(right + place, mask=is_output[:, None] & (place < inputs // 2), other=0)
            code = tl.reshape(code, (OUTPUTS, SCALES, PAIRS // SCALES))
            place = (first // SCALE_INPUTS + tl.arange(0, SCALES) * (2 if BOTH else 1))[None, :]
            some = is_output[:, None] & (place < scales_of_output)
            low, high = halves(code, scales, zeros, of_output + place, some, FORMAT)
            low = tl.reshape(low.to(a.dtype), (OUTPUTS, PAIRS))
            high = tl.reshape(high.to(a.dtype), (OUTPUTS, PAIRS))
            sums = tl.dot(b, tl.trans(high), tl.dot(a, tl.trans(low), sums))
        if FORMAT == "nvfp4":
            sums *= tl.load(factors + matrix, mask=is_output, other=0.0)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + weights[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def halves(code, scales, zeros, at, some, FORMAT: tl.constexpr):
    """The float32 of the lower and of the upper halves of codes [outputs, scales, pairs].

    Their scales are `at` [outputs, scales], where there are `some`.
    """
    scale = tl.load(scales + at, mask=some, other=0)[:, :, None]
    if FORMAT == "mxfp4":
        factor = power_of_two(scale)
        low, high = e2m1(code, 28) * factor, e2m1(code, 24) * factor
    elif FORMAT == "nvfp4":
        above = tl.load(scales + at + 1, mask=some, other=0)[:, :, None]
        low, high = e2m1(code, 28) * e4m3(scale), e2m1(code, 24) * e4m3(above)
    else:
        factor = scale.to(tl.float32)
        zero = tl.load(zeros + at, mask=some, other=0)[:, :, None]
        start = zero.to(tl.float32) * factor
        low = (code & 15).to(tl.float32) * factor - start
        high = (code >> 4).to(tl.float32) * factor - start
    return low, high


# Numbers of few bits are moved to the places of a float32's sign, exponent and mantissa. A multiplication
# then corrects the bias of the exponent, also of numbers without one, which are subnormal until then.


@triton.jit
def e4m3(code):
    """The float32 of a code: 4 bits of exponent with bias 7, 3 of mantissa. Not of NaN."""
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # 0x87f00000
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def e2m1(code, shift: tl.constexpr):
    """The float32 of a code: 2 bits of exponent with bias 1, 1 of mantissa. `shift` moves it to the top."""
    bits = (code.to(tl.int32) << shift >> 6) & -0x7E400000  # 0x81c00000
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def power_of_two(code):
    """The float32 of an E8M0 code: 2^(code - 127). 255 is NaN."""
    power = code.to(tl.int32)
    bits = tl.where(power == 0, 1 << 22, power << 23)  # 2^-127 has no exponent of its own
    return tl.where(power == 255, float("nan"), bits.to(tl.float32, bitcast=True))
