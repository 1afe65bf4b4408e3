"""The Triton kernel of compressed attention without a GPU: its results in Triton's interpreter, and its
machine code."""

from __future__ import annotations

import importlib

import pytest
import torch

from engine.cuda.compressed_op import compressed_attention
from tests.support.triton_code import CAPABILITIES, MOST_SHARED_BYTES, compiled, interpreted, unspecialized

POINTERS = {
    **dict.fromkeys(("q", "rows", "entries", "out"), "*bf16"),
    **dict.fromkeys(("row_table", "entry_table", "sequences", "visible", "chosen"), "*i32"),
    "sinks": "*fp32",
    "scale": "fp32",
}


@pytest.mark.kernels
@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "tokens", "window", "lengths"),
    [
        (4, 16, 1, 0, 8, (1, 30)),
        (40, 32, 4, 4, 24, (5, 70)),
        (16, 64, 16, 8, 40, (130, 7)),
        (17, 16, 16, 32, 33, (31, 200)),  # an entry in every second page
    ],
)
def test_it_attends_by_the_definition(
    heads: int, dim: int, page_size: int, tokens: int, window: int, lengths: tuple[int, ...], chooses: bool
) -> None:
    """The last tokens of each sequence. The scratch page is NaN."""
    interpreted()
    kernel = importlib.import_module("engine.cuda.compressed_kernel")
    torch.manual_seed(heads)
    width = -(-max(lengths) // page_size)
    pages = 1 + len(lengths) * width
    rows = torch.randn(pages, page_size, dim + 24).half()[..., : dim + 8]
    entries = torch.randn(pages, max(1, page_size // max(1, tokens)), dim + 8).half()
    rows[0], entries[0] = torch.nan, torch.nan
    tables = [(torch.randperm(pages - 1) + 1).int().view(len(lengths), width) for _ in range(2)]
    queries = [(i, length - back) for i, length in enumerate(lengths) for back in range(min(5, length))]
    sequences, visible = (torch.tensor(column, dtype=torch.int32) for column in zip(*queries, strict=True))
    chosen = None
    if chooses and tokens:
        each = [torch.randperm(max(lengths) // tokens + 1)[:3] for _ in queries]
        chosen = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=9999).int()
    q, sinks = torch.randn(len(queries), heads, dim).half(), torch.randn(heads)
    want, got = (torch.full_like(q, torch.nan) for _ in range(2))
    of_entries = entries if tokens else None
    arguments = q, rows, tables[0], of_entries, tables[1], chosen, sequences, visible, sinks
    compressed_attention(*arguments, want, 0.3, window, tokens, page_size)
    kernel.launch(*arguments, got, 0.3, window, tokens, page_size)
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.kernels
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("tokens", "chooses"), [(0, False), (128, False), (4, True)])
def test_it_becomes_machine_code(tokens: int, chooses: bool, capability: int) -> None:
    made = compiled(
        "compressed_kernel",
        "compressed_attention_kernel",
        [64, 512],
        POINTERS,
        {"COUNT": 64, "DIM": 512, "PAGE": 64, "WINDOW": 128, "PER_ENTRY": tokens, "CHOOSES": chooses},
        [] if chooses else ["chosen"],
        ["q", "rows", "entries", "out", "row_page_stride", "row_stride", "entry_page_stride", "entry_stride"],
        capability,
    )
    assert made["shared"] <= MOST_SHARED_BYTES
    assert made["spilled"] == 0
    assert "mma" in made["ptx"]


@pytest.mark.kernels
def test_it_is_compiled_for_no_value_that_differs_from_step_to_step() -> None:
    assert unspecialized("compressed_kernel", "compressed_attention_kernel") >= {
        *("sequences", "visible", "row_pages", "entry_pages", "chosen_count"),
    }
