"""A Triton kernel of one token of gated delta nets and of Kimi's delta attention, after the convolution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.cuda.softplus import softplus

_NORM_EPS = tl.constexpr(1e-6)  # of the norms of queries and keys


def launch(
    convolved: torch.Tensor,
    rates: torch.Tensor,
    decays: torch.Tensor,
    states: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    out: torch.Tensor,
    bound: float,
    most: float,
) -> None:
    """As state_ops.py: delta_step."""
    rows, key_heads, ratio = rates.shape
    heads, key_dim, value_dim = states.shape[1:]
    options = tile_options(key_dim, value_dim)
    delta_step_kernel[(triton.cdiv(value_dim, options["VALUES"]), heads, rows)](
        convolved, rates, decays, states, decay_rate, dt_bias, reads, writes, out,
        convolved.stride(0), rates.stride(0), rates.stride(1), decays.stride(0), decays.stride(1),
        states.stride(0), bound, most,
        KEY_HEADS=key_heads, RATIO=ratio, KEY=key_dim, VALUE=value_dim,
        OF_CHANNELS=decays.shape[2] > ratio, BOUNDED=bound < 0, **options,
    )  # fmt: skip


def tile_options(key_dim: int, value_dim: int) -> dict[str, int]:
    """The part of a head's state that a program has, and the warps that hold it in their registers."""
    keys, values = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    part = min(values, max(1, 4096 // keys))
    return {"KEYS": keys, "VALUES": part, "num_warps": max(1, min(4, keys * part // 1024))}


# Slots are parts of one array, at addresses that differ from batch to batch.
@triton.jit(do_not_specialize=["reads", "writes"])
def delta_step_kernel(
    convolved, rates, decays, states, decay_rate, dt_bias, reads, writes, out,
    convolved_row, rates_row, rates_head, decays_row, decays_head, slot_stride, bound, most,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    OF_CHANNELS: tl.constexpr, BOUNDED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """As state_ops.py: delta_step. A program has some columns of one head's state, which it reads and writes
    once: on a small batch there are as many programs as a GPU can run, and none needs many registers."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // RATIO
    of_key_head = head % RATIO
    i = tl.arange(0, KEYS)
    j = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key = i < KEY
    is_value = j < VALUE
    of_row = convolved + row * convolved_row
    q = tl.load(of_row + key_head * KEY + i, mask=is_key, other=0.0)
    k = tl.load(of_row + (KEY_HEADS + key_head) * KEY + i, mask=is_key, other=0.0)
    v = tl.load(of_row + 2 * KEY_HEADS * KEY + head * VALUE + j, mask=is_value, other=0.0)
    q *= tl.rsqrt(tl.sum(q * q, 0) + _NORM_EPS) * (KEY**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + _NORM_EPS)

    rate = tl.load(rates + row * rates_row + key_head * rates_head + of_key_head).to(tl.float32)
    beta = most * tl.sigmoid(rate)
    speed = tl.load(decay_rate + head)
    of_decays = decays + row * decays_row + key_head * decays_head
    if OF_CHANNELS:
        x = tl.load(of_decays + of_key_head * KEY + i, mask=is_key, other=0.0).to(tl.float32)
        x += tl.load(dt_bias + head * KEY + i, mask=is_key, other=0.0)
        if BOUNDED:
            decay = tl.exp(bound * tl.sigmoid(-speed * x))
        else:
            decay = tl.exp(speed * softplus(x))
    else:
        x = tl.load(of_decays + of_key_head).to(tl.float32) + tl.load(dt_bias + head)
        decay = tl.exp(speed * softplus(x)) + tl.zeros((KEYS,), tl.float32)

    places = head * KEY * VALUE + i[:, None] * VALUE + j[None, :]
    inside = is_key[:, None] & is_value[None, :]
    state = tl.load(states + tl.load(reads + row) * slot_stride + places, mask=inside, other=0.0)
    state *= decay[:, None]
    added = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * added[None, :]
    tl.store(states + tl.load(writes + row) * slot_stride + places, state, mask=inside)
    to = out + (row * KEY_HEADS * RATIO + head) * VALUE + j
    tl.store(to, tl.sum(state * q[:, None], 0), mask=is_value)
