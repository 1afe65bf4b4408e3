"""A Triton kernel of the gates and the norm of what a layer that keeps a state gives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(
    x: torch.Tensor,
    gates: torch.Tensor,
    norm: torch.Tensor | None,
    out: torch.Tensor,
    group: int,
    is_silu: bool,
    gates_first: bool,
    eps: float,
) -> None:
    """As state_ops.py: gated_norm."""
    rows, width = out.shape
    gated_norm_kernel[(width // group, rows)](
        x, gates, norm, out, gates.stride(0), gates.stride(1), width, eps,
        NORM=0 if norm is None else len(norm), SILU=is_silu, FIRST=gates_first, GROUP=group,
        OF_HEAD=gates.shape[2] // group, **tile_options(group),
    )  # fmt: skip


def tile_options(group: int) -> dict[str, int]:
    """The channels of a program, and its warps."""
    channels = triton.next_power_of_2(group)
    return {"CHANNELS": channels, "num_warps": max(1, min(16, channels // 512))}


@triton.jit
def gated_norm_kernel(
    x, gates, norm, out, gates_row, gates_head, width, eps,
    NORM: tl.constexpr, SILU: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr,
    OF_HEAD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """As state_ops.py: gated_norm. A program has one group of one row."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0)
    i = tl.arange(0, CHANNELS)
    some = i < GROUP
    values = tl.load(x + row * width + group * GROUP + i, mask=some, other=0.0)
    of_gates = gates + row * gates_row + group // OF_HEAD * gates_head + group % OF_HEAD * GROUP
    gate = tl.load(of_gates + i, mask=some, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if SILU:
        factor *= gate
    if FIRST:
        values *= factor
    if NORM > 0:
        values *= tl.rsqrt(tl.sum(values * values, 0) / GROUP + eps)
        values *= tl.load(norm + (group * GROUP) % NORM + i, mask=some, other=0.0)
    if not FIRST:
        values *= factor
    tl.store(out + row * width + group * GROUP + i, values.to(out.dtype.element_ty), mask=some)
