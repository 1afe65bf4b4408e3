"""The Triton kernels of decode steps of layers that keep a state, without a GPU: their results in Triton's
interpreter, and their machine code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.cuda.state_ops import conv_step, delta_step, gated_norm, mamba2_step
from tests.support.triton_code import CAPABILITIES, MOST_SHARED_BYTES, compiled, interpreted, unspecialized

SLOTS, ROWS = 7, 3
READS, WRITES = torch.tensor([1, 3, 4]), torch.tensor([2, 3, 6])


Arguments = list[Any]


def check(run: Callable[..., None], op: Callable[..., None], arguments: Arguments, own: Arguments) -> None:
    """Run a kernel on arguments of its own, and its definition, on a CPU: what they write is the same."""
    op(*arguments)
    run(*own)
    for got, want in zip(own, arguments, strict=True):
        if isinstance(want, torch.Tensor):
            got, want = got.cpu().float(), want.float()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, want.abs().max().item()))


def interpret(op: Callable[..., None], name: str, arguments: Arguments) -> None:
    """Views with gaps are given as they are, for a clone would have none. Nothing writes to them."""
    interpreted()
    kernel = importlib.import_module(f"engine.cuda.{name}_kernel")
    own = [
        each.clone() if isinstance(each, torch.Tensor) and each.is_contiguous() else each
        for each in arguments
    ]
    check(kernel.launch, op, arguments, own)


def of_convolution(channels: int, taps: int, has_bias: bool, dtype: torch.dtype) -> Arguments:
    torch.manual_seed(taps)
    inputs = torch.randn(ROWS, channels + 24).to(dtype)[:, 8 : 8 + channels]
    states = torch.randn(SLOTS, channels, taps).to(dtype)
    bias = torch.randn(channels) if has_bias else None
    out = torch.zeros(ROWS, channels)
    return [inputs, states, torch.randn(channels, taps), bias, READS, WRITES, out]


CONVOLUTIONS = [(40, 4, True), (256, 2, False), (600, 8, True), (600, 4, False)]
"""Channels, taps, and whether there is a bias."""


@pytest.mark.kernels
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_convolution(case: tuple[int, int, bool], dtype: torch.dtype) -> None:
    interpret(conv_step, "conv_step", of_convolution(*case, dtype))


def of_delta_net(dims: tuple[int, ...], of_channels: bool, bound: float, most: float) -> Arguments:
    key_heads, ratio, key_dim, value_dim = dims
    torch.manual_seed(key_dim)
    heads = key_heads * ratio
    convolved = torch.randn(ROWS, 2 * key_heads * key_dim + heads * value_dim)
    projected = torch.randn(ROWS, key_heads, 8 + ratio * (1 + key_dim))
    rates = projected[:, :, -ratio:]
    decays = projected[:, :, : ratio * (key_dim if of_channels else 1)]
    states = torch.randn(SLOTS, heads, key_dim, value_dim)
    speed, dt_bias = -torch.rand(heads) * 8, torch.randn(heads * (key_dim if of_channels else 1)) - 2
    out = torch.zeros(ROWS, heads * value_dim)
    return [convolved, rates, decays, states, speed, dt_bias, READS, WRITES, out, bound, most]


DELTA_NETS = [(2, 3, 32, 16), (1, 1, 24, 48), (2, 1, 160, 40)]
"""Key heads, values of each, and the sides of a state."""
DECAYS = [(False, 0.0, 2.0), (True, 0.0, 1.0), (True, -5.0, 1.0)]


@pytest.mark.kernels
@pytest.mark.parametrize("dims", DELTA_NETS)
@pytest.mark.parametrize("decays", DECAYS)
def test_a_delta_net(dims: tuple[int, ...], decays: tuple[bool, float, float]) -> None:
    interpret(delta_step, "delta_step", of_delta_net(dims, *decays))


def of_mamba2(heads: int, groups: int, head_dim: int, state_dim: int) -> Arguments:
    torch.manual_seed(heads)
    convolved = torch.randn(ROWS, heads * head_dim + 2 * groups * state_dim)
    steps = torch.randn(ROWS, 2 * heads)[:, heads:]
    states = torch.randn(SLOTS, heads, head_dim, state_dim)
    of_heads = (-torch.rand(heads) * 8, torch.randn(heads) - 3, torch.randn(heads))
    out = torch.zeros(ROWS, heads * head_dim)
    return [convolved, steps, states, *of_heads, READS, WRITES, out, groups]


MAMBA2 = [(6, 2, 16, 32), (4, 1, 24, 12), (2, 2, 64, 128)]
"""Heads, groups, and the sides of a state."""


@pytest.mark.kernels
@pytest.mark.parametrize("dims", MAMBA2)
def test_mamba2(dims: tuple[int, int, int, int]) -> None:
    interpret(mamba2_step, "mamba2_step", of_mamba2(*dims))


def of_gated_norm(sizes: tuple[int, int, int], weights: str, is_silu: bool, gates_first: bool) -> Arguments:
    group, of_head, heads = sizes
    torch.manual_seed(group)
    width = group * of_head * heads
    gates = torch.randn(ROWS, heads, 8 + group * of_head).half()[:, :, 8:]
    norm = {"all": torch.randn(width), "none": None, "one group": torch.randn(group)}[weights]
    out = torch.zeros(ROWS, width)
    return [torch.randn(ROWS, width), gates, norm, out, group, is_silu, gates_first, 1e-5]


GROUPS = [(48, 1, 1), (16, 3, 2), (600, 2, 1)]
"""Channels of a group, groups of a head, heads."""
NORMS = [("all", True, True), ("all", True, False), ("none", True, True), ("one group", False, False)]


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_gated_norm(sizes: tuple[int, int, int], norm: tuple[str, bool, bool]) -> None:
    interpret(gated_norm, "gated_norm", of_gated_norm(sizes, *norm))


ALL = [
    *((conv_step, of_convolution(*case, torch.bfloat16)) for case in CONVOLUTIONS),
    *((delta_step, of_delta_net(dims, *decays)) for dims in DELTA_NETS for decays in DECAYS),
    *((mamba2_step, of_mamba2(*dims)) for dims in MAMBA2),
    *((gated_norm, of_gated_norm(sizes, *norm)) for sizes in GROUPS for norm in NORMS),
]
"""What tests/gpu runs on a GPU."""


@pytest.mark.kernels
def test_small_time_steps_keep_their_digits() -> None:
    interpreted()
    kernel = importlib.import_module("engine.cuda.mamba2_step_kernel")
    raw = torch.linspace(-18, 30, 64)
    out, ones = torch.empty(1, 64), torch.ones(64)
    convolved = torch.ones(1, 64 + 2 * 16)
    states = torch.zeros(1, 64, 1, 16)
    slot = torch.tensor([0])
    kernel.launch(convolved, raw[None], states, -ones, 0 * ones, 0 * ones, slot, slot, out, 1)
    want = torch.nn.functional.softplus(raw.double())
    torch.testing.assert_close(states[0, :, 0, 0].double(), want, rtol=3e-6, atol=0)


SLOT_POINTERS = dict.fromkeys(("reads", "writes"), "*i64")
FLOATS = dict.fromkeys(
    ("convolved", "weight", "bias", "decay_rate", "rate", "dt_bias", "skip", "norm", "x"), "*fp32"
)
HALVES = dict.fromkeys(("inputs", "gates", "rates", "decays", "steps", "out"), "*bf16")
NUMBERS = dict.fromkeys(("bound", "most", "eps"), "fp32")
QWEN = {"KEY_HEADS": 16, "RATIO": 2, "KEY": 128, "VALUE": 128, "BOUNDED": False}
KERNELS = {
    "conv_step_kernel": ([8192], {"states": "*bf16", "out": "*fp32"}, {"TAPS": 4, "BIAS": True}),
    "delta_step_kernel": ([128, 128], {"out": "*fp32"}, {**QWEN, "OF_CHANNELS": False}),
    "mamba2_step_kernel": (
        [64, 128],
        {"out": "*fp32"},
        {"HEADS": 64, "GROUPS": 8, "DIM": 64, "STATE": 128},
    ),
    "gated_norm_kernel": (
        [8192],
        {},
        {"NORM": 8192, "SILU": True, "FIRST": True, "GROUP": 8192, "OF_HEAD": 1},
    ),
}
"""By name: the arguments of tile_options, types, and constants, in the widths of Qwen3-Next and Mamba-2's."""


@pytest.mark.kernels
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_they_become_machine_code(name: str, capability: int) -> None:
    sizes, types, constants = KERNELS[name]
    pointers = {"states": "*fp32", **FLOATS, **HALVES, **SLOT_POINTERS, **NUMBERS, **types}
    aligned = {"conv_step_kernel": ["states"], "gated_norm_kernel": ["x"]}.get(name, ["convolved", "states"])
    made = compiled(name, name, sizes, pointers, constants, [], aligned, capability)
    assert made["shared"] <= MOST_SHARED_BYTES
    assert not made["spilled"]


@pytest.mark.kernels
@pytest.mark.parametrize("dims", [(128, 128), (96, 192), (256, 256)])
@pytest.mark.parametrize("is_bounded", [False, True])
def test_kimis_decays_become_machine_code_too(dims: tuple[int, int], is_bounded: bool) -> None:
    key, value = dims
    constants = {**QWEN, "KEY": key, "VALUE": value, "OF_CHANNELS": True}
    pointers = {**FLOATS, **HALVES, **SLOT_POINTERS, **NUMBERS, "states": "*fp32", "out": "*fp32"}
    name = "delta_step_kernel"
    constants["BOUNDED"] = is_bounded
    assert not compiled(name, name, dims, pointers, constants, [], ["convolved", "states"], 90)["spilled"]


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["conv_step_kernel", "delta_step_kernel", "mamba2_step_kernel"])
def test_they_are_compiled_once_for_all_steps(name: str) -> None:
    assert unspecialized(name, name) == {"reads", "writes"}
