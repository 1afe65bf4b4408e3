"""The Triton kernel of an indexer's scores, without a GPU: its results in Triton's interpreter, and its
machine code."""

from __future__ import annotations

import importlib

import pytest
import torch

from engine.cuda.index_op import index_scores
from tests.support.triton_code import CAPABILITIES, MOST_SHARED_BYTES, compiled, interpreted, unspecialized

POINTERS = {
    **{"q": "*bf16", "keys": "*bf16", "weights": "*fp32", "out": "*fp32"},
    **dict.fromkeys(("page_table", "sequences", "visible"), "*i32"),
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "lengths"),
    [(4, 16, 1, (5, 70)), (64, 128, 16, (64, 1, 200)), (24, 64, 64, (130, 65))],
)
def test_scores_are_those_of_the_definition(
    heads: int, dim: int, page_size: int, lengths: tuple[int, ...]
) -> None:
    """The last 3 tokens of each sequence, in one layer of two, whose index keys end the rows."""
    interpreted()
    kernel = importlib.import_module("engine.cuda.index_kernel")
    torch.manual_seed(heads)
    width = -(-max(lengths) // page_size)
    pages = 1 + len(lengths) * width
    keys = torch.randn(pages, 2, page_size, 24 + dim).half()[:, 1, :, 24:]
    table = (torch.randperm(pages - 1) + 1).int().view(len(lengths), width)
    queries = [(i, length - back) for i, length in enumerate(lengths) for back in range(min(3, length))]
    sequences, visible = (torch.tensor(column, dtype=torch.int32) for column in zip(*queries, strict=True))
    q, weights = torch.randn(len(queries), heads, dim).half(), torch.randn(len(queries), heads)
    want, got = (torch.full((len(queries), width * page_size), torch.nan) for _ in range(2))
    index_scores(q, weights, keys, table, sequences, visible, want)
    kernel.launch(q, weights, keys, table, sequences, visible, got)
    assert want.isfinite().sum(1).equal(visible)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


@pytest.mark.kernels
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (64, 128)])
def test_it_becomes_machine_code(heads: int, dim: int, capability: int) -> None:
    made = compiled(
        "index_kernel",
        "index_scores_kernel",
        [heads],
        POINTERS,
        {"HEADS": heads, "DIM": dim, "PAGE": 64},
        [],
        ["q", "keys", "page_table", "out", "page_stride", "token_stride"],
        capability,
    )
    assert made["shared"] <= MOST_SHARED_BYTES
    assert not made["spilled"]
    assert "mma" in made["ptx"]


@pytest.mark.kernels
def test_it_is_compiled_once_for_all_steps() -> None:
    changing = {"weights", "sequences", "visible", "pages", "context"}
    assert unspecialized("index_kernel", "index_scores_kernel") == changing
