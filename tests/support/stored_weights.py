"""Random weights in the formats of checkpoints, and what they are in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.checkpoint.grouped import GroupedMatrix
from engine.checkpoint.mxfp4 import Mxfp4Matrix
from engine.checkpoint.nvfp4 import Nvfp4Matrix
from engine.checkpoint.scaled import ScaledMatrix
from engine.checkpoint.stored import StoredMatrix, StoredTensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def in_fp8(outputs: int, inputs: int, block: tuple[int, int] | None) -> tuple[torch.Tensor, ScaledMatrix]:
    """Float64 weights, all numbers of e4m3 but NaN among them, and how they are stored."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    numbers = codes.where(codes & 127 != 127, codes & 128).view(torch.float8_e4m3fn)
    high, wide = block or (outputs, inputs)
    scales = torch.rand(-(-outputs // high), -(-inputs // wide)) * 3e-3
    scales[0, 0] = 2.0**-9
    each = scales.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
    return numbers.double() * each.double(), ScaledMatrix(numbers, scales, (high, wide))


def in_mxfp4(outputs: int, inputs: int) -> tuple[torch.Tensor, Mxfp4Matrix]:
    """Float64 weights, and how they are stored. One block has none but zeros, and a power that bfloat16 has
    not."""
    codes = torch.randint(0, 16, (outputs, inputs // 32, 32), dtype=torch.uint8)
    powers = torch.randint(-20, 8, (outputs, inputs // 32))
    powers[0], codes[-1, 0], powers[-1, 0] = -90, 8 * (codes[-1, 0] // 8), -127
    weights = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).int())
    stored = Mxfp4Matrix(codes[..., ::2] | codes[..., 1::2] << 4, (powers + 127).to(torch.uint8))
    return torch.ldexp(weights, powers[..., None]).flatten(1).double(), stored


def in_nvfp4(outputs: int, inputs: int) -> tuple[torch.Tensor, Nvfp4Matrix]:
    """Float64 weights, and how they are stored. All scales of e4m3 but NaN may be there."""
    codes = torch.randint(0, 16, (outputs, inputs // 16, 16), dtype=torch.uint8)
    stored = torch.arange(outputs * inputs // 16, dtype=torch.uint8).view(outputs, -1)
    scales = stored.where(stored & 127 != 127, stored & 128).view(torch.float8_e4m3fn)
    factor = torch.rand(()) * 1e-3
    weights = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).int())
    exact = weights.double() * scales.double()[..., None] * factor.double()
    return exact.flatten(1), Nvfp4Matrix(codes[..., ::2] | codes[..., 1::2] << 4, scales, factor)


def in_int4(outputs: int, inputs: int, group: int) -> tuple[torch.Tensor, GroupedMatrix]:
    """Float64 weights, and how they are stored, with scales in float16. All zero points are there."""
    count = -(-inputs // group)
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales, zeros = (torch.rand(outputs, count) * 3e-3).half(), torch.arange(outputs * count) % 16
    zeros = zeros.to(torch.uint8).view(outputs, count)
    each = torch.arange(inputs) // group
    weights = (numbers.double() - zeros[:, each].double()) * scales[:, each].double()
    return weights, GroupedMatrix(numbers[:, ::2] | numbers[:, 1::2] << 4, scales, zeros, inputs, 4, group)


def in_format(form: str, outputs: int, inputs: int) -> tuple[torch.Tensor, StoredMatrix]:
    """As one of the functions above. Published checkpoints have such groups."""
    made = {
        "fp8": lambda: in_fp8(outputs, inputs, (16, 128)),
        "mxfp4": lambda: in_mxfp4(outputs, inputs),
        "nvfp4": lambda: in_nvfp4(outputs, inputs),
        "int4": lambda: in_int4(outputs, inputs, 32),
    }
    return made[form]()


def stored_experts(make: Callable[..., Any], family: str, form: str) -> tuple[Any, Any]:
    """Experts in bfloat16 whose weights are stored in `form`, and the same in float64.

    `make(dtype, family=family)` makes transformers' module.
    """
    experts, exact = make(torch.bfloat16, family=family), make(torch.float64, family=family)
    transposed = experts.is_transposed
    for name in ("gate_up_proj", "down_proj"):
        whole = []
        for exact_one in getattr(exact, name).data:
            outputs, inputs = exact_one.T.shape if transposed else exact_one.shape
            # gpt-oss alone has gates and ups in one weight.
            apart = (outputs // 2,) * 2 if family != "gpt_oss" and name == "gate_up_proj" else (outputs,)
            made = [in_format(form, rows, inputs) for rows in apart]
            weights = torch.cat([each for each, _ in made])
            exact_one.copy_(weights.T if transposed else weights)
            whole.append([stored for _, stored in made])
        parameter = StoredTensor(whole, torch.bfloat16, experts=True, transposed=transposed)
        setattr(experts, name, nn.Parameter(parameter, requires_grad=False))
    return experts, exact
