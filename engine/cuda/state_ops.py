"""One token of layers that keep a state, with the states in their slots: on CUDA Triton kernels, elsewhere
their definitions, with which tests compare the kernels and run models on a CPU.

In all of them B rows have one token each, which is not their first. `reads` and `writes` int64 [B] are their
slots, which may be the same. States are [slots, ...], all dimensions but the first contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_NORM_EPS = 1e-6  # of the norms of a delta net's queries and keys


@torch.library.custom_op("baton::conv_step", mutates_args=("states", "out"))
def conv_step(
    inputs: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reads: torch.Tensor,
    writes: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """A causal convolution of each channel by itself, and SiLU: inputs [B, channels], out float32 [B,
    channels], contiguous. States are [slots, channels, taps], the last inputs. weight [channels, taps] and
    bias [channels] are float32."""
    from engine.cuda.conv_step_kernel import launch

    launch(inputs, states, weight, bias, reads, writes, out)


@conv_step.register_kernel("cpu")
def _conv_step(
    inputs: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    reads: torch.Tensor,
    writes: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """By its definition."""
    after = torch.cat([states[reads][:, :, 1:], inputs[:, :, None].to(states.dtype)], dim=2)
    states[writes] = after
    sums = (after.float() * weight).sum(-1)
    out.copy_(functional.silu(sums if bias is None else sums + bias))


@torch.library.custom_op("baton::delta_step", mutates_args=("states", "out"))
def delta_step(
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
    """The recurrence of a gated delta net (arXiv 2412.06464), or of Kimi's delta attention (arXiv
    2510.26692): out float32 [B, heads x value dim], contiguous.

    convolved float32 [B, channels] has the queries of all key heads, their keys, and the values of all heads.
    rates [B, key heads, ratio] and decays [B, key heads, ratio, or ratio x key dim] are strided, the last
    dimension contiguous. States are float32 [slots, heads, key dim, value dim]. decay_rate [heads] is
    -e^A_log, dt_bias [heads] or [heads x key dim], both float32. `most` multiplies the sigmoid of a rate.
    bound: 0, or the least logarithm of a channel's decay, where it is that times a sigmoid.
    """
    from engine.cuda.delta_step_kernel import launch

    launch(convolved, rates, decays, states, decay_rate, dt_bias, reads, writes, out, bound, most)


@delta_step.register_kernel("cpu")
def _delta_step(
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
    """By its definition."""
    rows, key_heads, ratio = rates.shape
    heads, key_dim, value_dim = states.shape[1:]
    keys = key_heads * key_dim
    of_keys = torch.split(convolved[:, : 2 * keys], keys, dim=1)
    q, k = (part.view(rows, key_heads, key_dim) for part in of_keys)
    v = convolved[:, 2 * keys :].view(rows, heads, value_dim)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(ratio, dim=1) for x in (q * key_dim**-0.5, k))
    x = decays.float().reshape(rows, heads, -1) + dt_bias.view(heads, -1)
    speed = decay_rate[:, None]
    decay = (bound * torch.sigmoid(-speed * x) if bound < 0 else speed * functional.softplus(x)).exp()
    state = states[reads] * decay[..., None]
    beta = most * rates.float().reshape(rows, heads, 1).sigmoid()
    added = beta * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * added[:, :, None, :]
    states[writes] = state
    out.copy_(torch.einsum("bhkv,bhk->bhv", state, q).reshape(rows, -1))


@torch.library.custom_op("baton::mamba2_step", mutates_args=("states", "out"))
def mamba2_step(
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
    """The recurrence of Mamba-2 (arXiv 2405.21060): out float32 [B, heads x head dim], contiguous.

    convolved float32 [B, channels] has x of all heads, then B and C of all groups; steps [B, heads], strided
    rows, is what time steps are made of. States are float32 [slots, heads, head dim, state dim]. rate
    (-e^A_log), dt_bias and skip (D) are float32 [heads].
    """
    from engine.cuda.mamba2_step_kernel import launch

    launch(convolved, steps, states, rate, dt_bias, skip, reads, writes, out, groups)


@mamba2_step.register_kernel("cpu")
def _mamba2_step(
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
    """By its definition."""
    rows, (heads, head_dim, state_dim) = len(out), states.shape[1:]
    width, of_groups = heads * head_dim, groups * state_dim
    x, b, c = torch.split(convolved, [width, of_groups, of_groups], dim=1)
    x = x.reshape(rows, heads, head_dim)
    b, c = (y.reshape(rows, groups, state_dim).repeat_interleave(heads // groups, dim=1) for y in (b, c))
    step = functional.softplus(steps.float() + dt_bias)
    state = states[reads] * (step * rate).exp()[..., None, None]
    state = state + torch.einsum("bhp,bhn->bhpn", x * step[..., None], b)
    states[writes] = state
    out.copy_((torch.einsum("bhpn,bhn->bhp", state, c) + skip[:, None] * x).view(rows, -1))


@torch.library.custom_op("baton::gated_norm", mutates_args=("out",))
def gated_norm(
    x: torch.Tensor,
    gates: torch.Tensor,
    norm: torch.Tensor | None,
    out: torch.Tensor,
    group: int,
    is_silu: bool,
    gates_first: bool,
    eps: float,
) -> None:
    """x float32 [B, width], contiguous, times the SiLU or the sigmoid of gates, and an RMSNorm of each
    `group` of channels, after the gates or before them; none without `norm`, a float32 weight [width], or
    [group] for all groups. gates [B, heads, width / heads] are strided, a head has whole groups. out is
    [B, width], contiguous."""
    from engine.cuda.gated_norm_kernel import launch

    launch(x, gates, norm, out, group, is_silu, gates_first, eps)


@gated_norm.register_kernel("cpu")
def _gated_norm(
    x: torch.Tensor,
    gates: torch.Tensor,
    norm: torch.Tensor | None,
    out: torch.Tensor,
    group: int,
    is_silu: bool,
    gates_first: bool,
    eps: float,
) -> None:
    """By its definition."""
    gate = gates.float().reshape(len(x), -1, group)
    factor = functional.silu(gate) if is_silu else gate.sigmoid()
    y = x.view(gate.shape)
    y = y * factor if gates_first else y
    if norm is not None:
        y = functional.rms_norm(y, (group,), None, eps) * norm.view(-1, group)
    out.copy_((y if gates_first else y * factor).flatten(1))


@conv_step.register_fake
@delta_step.register_fake
@mamba2_step.register_fake
@gated_norm.register_fake
def _nothing(*_: Any) -> None:
    return None
