"""The Triton kernel of attention in recorded decode steps, without a GPU: its results in Triton's
interpreter, and its machine code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.cuda.attention_op import decode_attention, splits_of
from tests.support.triton_code import CAPABILITIES, MOST_SHARED_BYTES, compiled, interpreted

DTYPES = [torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class AttentionCase:
    """Rows of `lengths` tokens."""

    lengths: tuple[int, ...]
    kv_heads: int
    group: int
    dim: int
    page_size: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def inputs(self, is_fused: bool, dtype: torch.dtype) -> list[Any]:
        """The arguments of decode_attention, those of norms and rotary embedding if `is_fused`. One layer of
        two, whose pages are in any order; q, k and v are parts of a longer row."""
        torch.manual_seed(len(self.lengths))
        rows, heads, dim = len(self.lengths), self.kv_heads * self.group, self.dim
        counts = [-(-length // self.page_size) for length in self.lengths]
        pool = torch.randn(sum(counts) + 1, 2, 2, self.kv_heads, self.page_size, dim).to(dtype)[:, 1]
        pages = (torch.randperm(sum(counts)) + 1).int()
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        qkv = torch.randn(rows, (heads + 2 * self.kv_heads) * dim).to(dtype)
        widths = [heads * dim, self.kv_heads * dim, self.kv_heads * dim]
        q, k, v = (part.view(rows, -1, dim) for part in qkv.split(widths, dim=1))
        norms = [(torch.randn(dim) * 0.2 + 1).to(dtype) for _ in range(2)]
        positions = torch.tensor(self.lengths) - 1
        angles = torch.rand(max(self.lengths), dim // 2) * 6
        rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
        fused = [*norms, rotary, positions] if is_fused else [None] * 4
        splits = splits_of(rows, self.kv_heads)
        parts = torch.full((rows, heads, splits, dim), torch.nan)
        peaks = torch.full((rows, heads, splits, 2), torch.nan)
        counted = torch.zeros(rows, self.kv_heads, dtype=torch.int32)
        out = torch.full((rows, heads, dim), torch.nan, dtype=dtype)
        lengths = torch.tensor(self.lengths).int()
        sinks = (torch.randn(heads) * 3).to(dtype) if self.has_sinks else None
        return [
            q, k, v, *fused, pool, pages, starts, lengths, parts, peaks, counted, out, sinks, dim**-0.5, 1e-6,
            self.window, self.softcap,
        ]  # fmt: skip

    def check(self, got: list[Any], want: list[Any], attention: Callable[..., object]) -> None:
        """`attention` of `got`, twice, is the definition of `want`, which has the same values on a CPU."""
        decode_attention(*want)
        for _ in range(2):
            attention(*got)
            assert not got[13].any(), "the counts are zeros for the next layer"
        rounding = torch.finfo(want[0].dtype).eps
        for place in (7, 14):  # pool and out
            error = (got[place].float().cpu() - want[place].float()).abs()
            assert error.max() <= 4 * rounding * want[place].float().abs().max()
            assert error.mean() <= rounding * want[place].float().abs().mean()


SHAPES = [
    AttentionCase((300,), 1, 2, 64, 16),  # several splits of one row
    AttentionCase((1, 16, 17, 700), 2, 4, 64, 16),  # some rows with less tokens than splits
    AttentionCase((65, 64), 2, 1, 128, 16),  # the new token is alone on its tile, and last on it
    AttentionCase((33, 130, 1), 1, 8, 256, 8),
    AttentionCase((40, 15, 1), 1, 8, 512, 16),
    AttentionCase((90,) * 40, 8, 2, 64, 16),  # one split each
    AttentionCase((5, 130, 300), 2, 4, 64, 16, window=120, has_sinks=True),
    AttentionCase((70, 90, 1) * 40, 2, 2, 64, 64, window=6, has_sinks=True),  # a whole tile is not seen
    AttentionCase((33, 200), 2, 2, 256, 16, window=64, softcap=1.5),
]


FUSED = {"NORM": True, "ROTARY": True}
PLAIN = FUSED | {"SINKS": False, "WINDOW": 0, "CAPPED": False}
WITH_ALL = FUSED | {"SINKS": True, "WINDOW": 128, "CAPPED": True}


@pytest.mark.kernels
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_the_definition(shape: AttentionCase, is_fused: bool) -> None:
    interpreted()
    kernel = importlib.import_module("engine.cuda.attention_kernel")
    # The interpreter multiplies no bfloat16.
    shape.check(shape.inputs(is_fused, torch.float16), shape.inputs(is_fused, torch.float16), kernel.launch)


@pytest.mark.kernels
@pytest.mark.parametrize(("dim", "splits"), [(64, 32), (128, 32), (128, 1), (256, 8), (512, 8)])
@pytest.mark.parametrize("variant", [PLAIN, WITH_ALL], ids=["plain", "all"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_becomes_machine_code(capability: int, variant: dict[str, Any], dim: int, splits: int) -> None:
    floats = dict.fromkeys(("q", "k", "v", "q_norm", "k_norm", "pool", "out", "sinks"), "*bf16")
    sums = dict.fromkeys(("rotary", "parts", "peaks"), "*fp32") | {"positions": "*i64"}
    counts = dict.fromkeys(("pages", "starts", "lengths", "counts"), "*i32")
    made = compiled(
        "attention_kernel",
        "decode_attention_kernel",
        [dim, splits],
        floats | sums | counts | {"scale": "fp32", "eps": "fp32", "softcap": "fp32"},
        {"KV_HEADS": 8, "GROUP": 4, "DIM": dim, "PAGE": 16, "SPLITS": splits} | variant,
        [] if variant["SINKS"] else ["sinks"],
        [*floats, *sums, *counts, "q_stride", "k_stride", "v_stride", "page_stride"],
        capability,
    )
    assert made["shared"] <= MOST_SHARED_BYTES
    assert not made["spilled"]
    assert "mma.sync" in made["ptx"]
    assert "cp.async" in made["ptx"], "tokens are loaded while others are attended to"
    assert ("griddepcontrol.wait" in made["ptx"]) == (capability >= 90)
