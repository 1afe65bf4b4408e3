"""The Triton kernel that draws tokens, without a GPU: its results in Triton's interpreter, and its machine
code."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.cuda.draw import draw
from engine.noise import stream_key
from tests.support.triton_code import CAPABILITIES, compiled, interpreted

ROWS = 5


@dataclass(frozen=True)
class DrawCase:
    """What of top-k, top-p and min-p some rows of a batch have."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    def inputs(self, vocab: int, dtype: torch.dtype) -> list[Any]:
        """The arguments of draw. Rounded scores have ties, also at the borders."""
        torch.manual_seed(vocab)
        scores = (torch.randn(ROWS, vocab) * 3).to(dtype)
        temperatures = torch.tensor([[1.0], [0.7], [2.0], [0.3], [1.0]])
        top_k = torch.tensor([[20], [5], [0], [1], [0]])
        kth = scores.topk(20).values.gather(1, (top_k - 1).clamp(min=0))
        may_drop = torch.tensor([[0.1], [0.0], [0.3], [0.5], [0.0]], dtype=torch.float64)
        lowest = torch.tensor([[-math.inf], [math.log(0.05)], [-math.inf], [-math.inf], [-math.inf]])
        is_drawn = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0]])
        streams = torch.tensor([stream_key(row, 3) for row in range(ROWS)])
        of_k = (kth, top_k) if self.top_k else (None, None)
        rest = (may_drop if self.top_p else None, lowest if self.min_p else None)
        return [scores, temperatures, *of_k, *rest, is_drawn, streams, torch.arange(ROWS) % 2]

    def check(self, got: list[Any], want: list[Any], drawing: Callable[..., Any]) -> None:
        """`drawing` of `got` is the definition of `want`, which has the same values on a CPU, at several
        positions, and of scores that are not finite."""
        for step in range(6):
            for inputs in (got, want):
                inputs[-1] += 1
                if step == 4:
                    inputs[0][2, 7], inputs[0][3, 9] = math.nan, math.inf
                    inputs[0][0] = -math.inf
            tokens, is_valid = (each.cpu() for each in drawing(*got))
            expected, should_be = draw(*want)
            assert is_valid.tolist() == should_be.tolist()
            assert (is_valid.tolist() == [True] * ROWS) == (step < 4)
            assert tokens[is_valid].tolist() == expected[is_valid].tolist()
            assert ((tokens >= 0) & (tokens < want[0].shape[1])).all(), "some token of the vocabulary"


CASES = [
    DrawCase(),
    DrawCase(top_k=True),
    DrawCase(top_p=True),
    DrawCase(min_p=True),
    DrawCase(top_k=True, top_p=True, min_p=True),
]


class _Library:
    """CUDA's logarithms, which Triton's interpreter does not have."""

    @staticmethod
    def log(x: Any) -> Any:
        import triton.language as tl

        return tl.log(x)

    @staticmethod
    def log1p(x: Any) -> Any:
        import triton.language as tl

        whole = 1 + x
        return tl.where(whole == 1, x, tl.log(whole) * x / (whole - 1))


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab", [50, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of inf - inf
def test_tokens_are_those_of_the_definition(
    dtype: torch.dtype, vocab: int, case: DrawCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted()
    kernel = importlib.import_module("engine.cuda.draw_kernel")
    monkeypatch.setattr(kernel, "libdevice", _Library)

    def drawing(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, is_valid = torch.full((ROWS,), -1), torch.zeros(ROWS, dtype=torch.bool)
        kernel.launch(*inputs, tokens, is_valid)
        return tokens, is_valid

    case.check(case.inputs(vocab, dtype), case.inputs(vocab, dtype), drawing)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_becomes_machine_code(capability: int, dtype: str) -> None:
    types = {"scores": dtype, "temperatures": "*fp32", "kth": dtype, "top_k": "*i64", "may_drop": "*fp64"}
    types |= {"lowest": "*fp32", "is_drawn": "*fp32", "streams": "*i64", "positions": "*i64"}
    types |= {"candidates": "*fp32", "tokens": "*i64", "is_valid": "*i1"}
    aligned = ["scores", "vocab", "stride"]
    made = compiled("draw_kernel", "draw_kernel", [], types, {}, [], aligned, capability)
    assert not made["spilled"]
    assert "ld.global.v4" in made["ptx"] or "v4.b32" in made["ptx"]
