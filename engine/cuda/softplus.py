"""log(1 + e^x), for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(t / (2 + t)) by its series: relative
    error about 1e-6. The logarithm of a rounded sum would have no digits left of small time steps."""
    t = tl.exp(-tl.abs(x))
    s = t / (2.0 + t)
    square = s * s
    series = 2.0 / 11
    series = series * square + 2.0 / 9
    series = series * square + 2.0 / 7
    series = series * square + 2.0 / 5
    series = series * square + 2.0 / 3
    series = series * square + 2.0
    return tl.maximum(x, 0.0) + series * s
