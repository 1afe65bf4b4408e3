"""A Triton kernel of one token of a Mamba-2 layer, after the convolution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.cuda.softplus import softplus


def launch(
    convolved: torch.Tensor,
    steps: torch.Tensor,
    states: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    out: torch.Tensor,
    groups: int,
) -> None:
    """As state_ops.py: mamba2_step."""
    rows, (heads, head_dim, state_dim) = len(out), states.shape[1:]
    mamba2_step_kernel[(heads, rows)](
        convolved, steps, states, rate, dt_bias, skip, reads, writes, out,
        convolved.stride(0), steps.stride(0), states.stride(0),
        HEADS=heads, GROUPS=groups, DIM=head_dim, STATE=state_dim,
        **tile_options(head_dim, state_dim),
    )  # fmt: skip


def tile_options(head_dim: int, state_dim: int) -> dict[str, int]:
    """The tile of a head's state, and the warps that hold it in their registers, 64 numbers a thread."""
    dims, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    return {"DIMS": dims, "STATES": columns, "num_warps": max(1, min(16, dims * columns // 2048))}


# Slots are parts of one array, at addresses that differ from batch to batch.
@triton.jit(do_not_specialize=["reads", "writes"])
def mamba2_step_kernel(
    convolved, steps, states, rate, dt_bias, skip, reads, writes, out,
    convolved_row, steps_row, slot_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    DIMS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """As state_ops.py: mamba2_step. A program has one head of one row, whose state it reads and writes
    once."""
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    group = head // (HEADS // GROUPS)
    i = tl.arange(0, DIMS)
    j = tl.arange(0, STATES)
    is_dim = i < DIM
    is_state = j < STATE
    of_row = convolved + row * convolved_row
    x = tl.load(of_row + head * DIM + i, mask=is_dim, other=0.0)
    of_groups = of_row + HEADS * DIM + group * STATE
    b = tl.load(of_groups + j, mask=is_state, other=0.0)
    c = tl.load(of_groups + GROUPS * STATE + j, mask=is_state, other=0.0)
    step = softplus(tl.load(steps + row * steps_row + head).to(tl.float32) + tl.load(dt_bias + head))

    places = head * DIM * STATE + i[:, None] * STATE + j[None, :]
    inside = is_dim[:, None] & is_state[None, :]
    state = tl.load(states + tl.load(reads + row) * slot_stride + places, mask=inside, other=0.0)
    state = state * tl.exp(step * tl.load(rate + head)) + (x * step)[:, None] * b[None, :]
    tl.store(states + tl.load(writes + row) * slot_stride + places, state, mask=inside)
    result = tl.sum(state * c[None, :], 1) + tl.load(skip + head) * x
    tl.store(out + (row * HEADS + head) * DIM + i, result, mask=is_dim)
