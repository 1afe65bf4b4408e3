"""A Triton kernel of one token of a causal convolution that keeps its last inputs as a state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(
    inputs: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reads: torch.Tensor,
    writes: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As state_ops.py: conv_step."""
    rows, channels = out.shape
    options = tile_options(channels)
    conv_step_kernel[(triton.cdiv(channels, options["CHANNELS"]), rows)](
        inputs, states, weight, bias, reads, writes, out, inputs.stride(0), states.stride(0), channels,
        TAPS=states.shape[2], BIAS=bias is not None, **options,
    )  # fmt: skip


def tile_options(channels: int) -> dict[str, int]:
    """The channels of a program, and its warps."""
    return {"CHANNELS": min(256, triton.next_power_of_2(channels)), "num_warps": 4}


# Slots are parts of one array, at addresses that differ from batch to batch.
@triton.jit(do_not_specialize=["reads", "writes"])
def conv_step_kernel(
    inputs, states, weight, bias, reads, writes, out, row_stride, slot_stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """As state_ops.py: conv_step. A program has some channels of one row: each input of its state is read
    before the one before it is overwritten."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    some = channel < channels
    new = tl.load(inputs + row * row_stride + channel, mask=some, other=0.0).to(tl.float32)
    before = states + tl.load(reads + row) * slot_stride + channel * TAPS
    after = states + tl.load(writes + row) * slot_stride + channel * TAPS
    sums = tl.zeros((CHANNELS,), tl.float32)
    if BIAS:
        sums += tl.load(bias + channel, mask=some, other=0.0)
    for tap in tl.static_range(TAPS):
        value = new
        if tap < TAPS - 1:
            value = tl.load(before + tap + 1, mask=some, other=0.0).to(tl.float32)
        sums += value * tl.load(weight + channel * TAPS + tap, mask=some, other=0.0)
        tl.store(after + tap, value.to(states.dtype.element_ty), mask=some)
    tl.store(out + row * channels + channel, sums * tl.sigmoid(sums), mask=some)
