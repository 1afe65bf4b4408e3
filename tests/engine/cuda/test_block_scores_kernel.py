"""The Triton kernel of block-sparse attention's scores, without a GPU: its results in Triton's interpreter,
and its machine code."""

from __future__ import annotations

import importlib

import pytest
import torch

from engine.cuda.block_scores_op import block_scores
from tests.support.triton_code import CAPABILITIES, MOST_SHARED_BYTES, compiled, interpreted, unspecialized

POINTERS = {
    **{"q": "*bf16", "keys": "*bf16", "out": "*fp32"},
    **dict.fromkeys(("page_table", "sequences", "visible"), "*i32"),
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "tokens", "lengths"),
    [
        (4, 128, 16, 128, (130, 1, 400, 256)),
        (2, 16, 1, 8, (5, 70)),
        (1, 32, 16, 16, (33, 64)),
        (20, 64, 32, 96, (97, 200)),
    ],
)
def test_scores_are_those_of_the_definition(
    heads: int, dim: int, page_size: int, tokens: int, lengths: tuple[int, ...]
) -> None:
    """The last 3 tokens of each sequence, in one layer of two."""
    interpreted()
    kernel = importlib.import_module("engine.cuda.block_scores_kernel")
    torch.manual_seed(heads)
    width = -(-max(lengths) // page_size)
    pages = 1 + len(lengths) * width
    keys = torch.randn(pages, 2, 3 * page_size, dim).half()[:, 1, -page_size:]
    table = (torch.randperm(pages - 1) + 1).int().view(len(lengths), width)
    queries = [(i, length - back) for i, length in enumerate(lengths) for back in range(min(3, length))]
    sequences, visible = (torch.tensor(column, dtype=torch.int32) for column in zip(*queries, strict=True))
    q = torch.randn(len(queries), heads, dim).half()
    blocks = -(-width * page_size // tokens)
    want, got = (torch.full((len(queries), heads, blocks), torch.nan) for _ in range(2))
    block_scores(q, keys, table, sequences, visible, want, tokens)
    kernel.launch(q, keys, table, sequences, visible, got, tokens)
    assert want.isfinite().sum(2).equal((-(-visible // tokens))[:, None].expand(-1, heads))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


@pytest.mark.kernels
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_becomes_machine_code(capability: int) -> None:
    """In the widths of MiniMax-M3."""
    made = compiled(
        "block_scores_kernel",
        "block_scores_kernel",
        [4, 128],
        POINTERS,
        {"HEADS": 4, "DIM": 128, "PAGE": 64, "BLOCK": 128},
        [],
        ["q", "keys", "page_table", "out", "page_stride", "token_stride"],
        capability,
    )
    assert made["shared"] <= MOST_SHARED_BYTES
    assert not made["spilled"]
    assert "mma" in made["ptx"]


@pytest.mark.kernels
def test_it_is_compiled_once_for_all_steps() -> None:
    changing = {"sequences", "visible", "pages", "blocks"}
    assert unspecialized("block_scores_kernel", "block_scores_kernel") == changing
