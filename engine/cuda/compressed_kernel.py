"""A Triton kernel of compressed attention: rows of a window, then entries, in one running softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def launch(
    q: torch.Tensor,
    rows: torch.Tensor,
    row_table: torch.Tensor,
    entries: torch.Tensor | None,
    entry_table: torch.Tensor,
    chosen: torch.Tensor | None,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    tokens: int,
    page_size: int,
) -> None:
    """As compressed_op.py: compressed_attention."""
    n, heads, dim = q.shape
    options = tile_options(heads, dim)
    of_entries = rows if entries is None else entries  # not read without `tokens`
    compressed_attention_kernel[(triton.cdiv(heads, options["HEADS"]), n)](
        q, rows, row_table, of_entries, entry_table, chosen, sequences, visible, sinks, out,
        rows.stride(0), rows.stride(1), of_entries.stride(0), of_entries.stride(1), row_table.shape[1],
        entry_table.shape[1], 0 if chosen is None else chosen.shape[1], scale,
        COUNT=heads, DIM=dim, PAGE=page_size, WINDOW=window, PER_ENTRY=tokens, CHOOSES=chosen is not None,
        **options,
    )  # fmt: skip


def tile_options(heads: int, dim: int) -> dict[str, int]:
    """The heads and rows of a tile, its warps, and the tiles being loaded. Heads of 512 and two tiles of rows
    are in a GPU's 99 KiB at least, and 8 warps have registers for the sums."""
    of_heads = 32 if heads > 16 else 16  # what tensor cores multiply
    return {"HEADS": of_heads, "ROWS": 32, "num_warps": 8 if dim > 256 else 4, "num_stages": 2}


# These differ from step to step. Compiled for their values, the kernel would be compiled while requests wait.
@triton.jit(
    do_not_specialize=["sequences", "visible", "sinks", "row_pages", "entry_pages", "chosen_count", "chosen"]
)
def compressed_attention_kernel(
    q, rows, row_table, entries, entry_table, chosen, sequences, visible, sinks, out,
    row_page_stride, row_stride, entry_page_stride, entry_stride, row_pages, entry_pages, chosen_count, scale,
    COUNT: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    PER_ENTRY: tl.constexpr, CHOOSES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As compressed_op.py: compressed_attention. A program computes some heads of one query. Its running
    softmax begins with the sinks."""
    query = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    is_head = head < COUNT
    of_dim = tl.arange(0, DIM)
    sequence = tl.load(sequences + query).to(tl.int64)
    seen = tl.load(visible + query)
    places = (query * COUNT + head)[:, None] * DIM + of_dim[None, :]
    heads = tl.load(q + places, mask=is_head[:, None], other=0.0)
    peak = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    total = tl.full((HEADS,), 1.0, tl.float32)
    sums = tl.zeros((HEADS, DIM), tl.float32)
    scale *= LOG2_E
    table = row_table + sequence * row_pages
    for first in range(tl.maximum(seen - WINDOW, 0), seen, ROWS):
        token = first + tl.arange(0, ROWS)
        is_seen = token < seen
        page = tl.load(table + token // PAGE, mask=is_seen, other=0).to(tl.int64)
        at = page * row_page_stride + token % PAGE * row_stride
        peak, total, sums = attended(heads, rows, at, is_seen, scale, peak, total, sums, DIM)
    if PER_ENTRY > 0:
        count = seen // PER_ENTRY
        table = entry_table + sequence * entry_pages
        wanted = chosen_count if CHOOSES else count
        for first in range(0, wanted, ROWS):
            place = first + tl.arange(0, ROWS)
            is_seen = place < wanted
            number = place
            if CHOOSES:
                number = tl.load(chosen + query * chosen_count + place, mask=is_seen, other=count)
                is_seen = number < count
            last = (number + 1) * PER_ENTRY - 1
            page = tl.load(table + last // PAGE, mask=is_seen, other=0).to(tl.int64)
            at = page * entry_page_stride + last % PAGE // PER_ENTRY * entry_stride
            peak, total, sums = attended(heads, entries, at, is_seen, scale, peak, total, sums, DIM)
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, result, mask=is_head[:, None])


@triton.jit
def attended(heads, rows, at, is_seen, scale, peak, total, sums, DIM: tl.constexpr):
    """The running softmax with a tile of rows more, each of which is key and value: peaks [heads], to base 2,
    totals, and sums [heads, DIM]."""
    tile = tl.load(rows + at[:, None] + tl.arange(0, DIM)[None, :], mask=is_seen[:, None], other=0.0)
    scores = tl.where(is_seen[None, :], tl.dot(heads, tl.trans(tile)) * scale, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(peak - higher)
    total = total * shrunk + tl.sum(weights, 1)
    sums = tl.dot(weights.to(tile.dtype), tile, sums * shrunk[:, None])
    return higher, total, sums
