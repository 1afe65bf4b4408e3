"""The Triton kernel of products of one row, without a GPU: its results in Triton's interpreter, and its
machine code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.cuda.row_product import row_product
from tests.support.triton_code import CAPABILITIES, compiled, interpreted


@dataclass(frozen=True)
class RowCase:
    """What happens around a product."""

    has_norm: bool = False
    has_bias: bool = False
    gated: bool = False
    add: bool = False

    def inputs(self, size: tuple[int, int], dtype: torch.dtype) -> list[Any]:
        """The arguments of row_product, with weights [outputs, inputs]."""
        torch.manual_seed(sum(size))
        outputs, inputs = size
        weight = (torch.randn(outputs * (2 if self.gated else 1), inputs) * inputs**-0.5).to(dtype)
        norm = (torch.randn(inputs) * 0.3 + 1).to(dtype) if self.has_norm else None
        bias = torch.randn(outputs).to(dtype) if self.has_bias else None
        x, out = torch.randn(1, inputs).to(dtype), torch.randn(1, outputs).to(dtype)
        return [x, norm, weight, bias, out, self.gated, self.add, 1e-6]

    def check(self, got: list[Any], want: list[Any], product: Callable[..., object]) -> None:
        """`product` of `got` is the definition of `want`, which has the same values on a CPU."""
        row_product(*want)
        product(*got)
        rounding = torch.finfo(want[0].dtype).eps
        torch.testing.assert_close(got[4].cpu(), want[4], rtol=rounding, atol=rounding * 0.1)


KINDS = [
    RowCase(has_norm=True),
    RowCase(has_norm=True, has_bias=True),
    RowCase(add=True),
    RowCase(add=True, has_bias=True),
    RowCase(has_norm=True, gated=True),
]
SIZES = [(48, 64), (33, 1000), (40, 2048), (7, 5000)]


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_results_are_those_of_the_definition(size: tuple[int, int], kind: RowCase) -> None:
    interpreted()
    kernel = importlib.import_module("engine.cuda.row_kernel")
    kind.check(kind.inputs(size, torch.float16), kind.inputs(size, torch.float16), kernel.launch)


@pytest.mark.kernels
@pytest.mark.parametrize(("inputs", "kind"), [(1024, KINDS[0]), (4096, KINDS[4]), (12_288, KINDS[2])])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_becomes_machine_code(capability: int, inputs: int, kind: RowCase) -> None:
    pointers = ["x", "weight", "out", *(["norm"] if kind.has_norm else [])]
    made = compiled(
        "row_kernel",
        "row_product_kernel",
        [inputs, kind.gated],
        dict.fromkeys(pointers, "*bf16") | {"eps": "fp32"},
        {"INPUTS": inputs, "NORM": kind.has_norm, "BIAS": False, "GATED": kind.gated, "ADD": kind.add},
        ["bias", *([] if kind.has_norm else ["norm"])],
        [*pointers, "outputs"],
        capability,
    )
    first_load, wait = made["ptx"].find("ld.global"), made["ptx"].find("griddepcontrol.wait")
    assert (wait > first_load) == (capability >= 90), "weights are asked for before the row is there"
    assert not made["spilled"]
    assert "ld.global.v4" in made["ptx"] or "v4.b32" in made["ptx"]
