"""A Triton kernel of the scores of block-sparse attention's indexer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    tokens: int,
) -> None:
    """As block_scores_op.py: block_scores."""
    n, heads, dim = q.shape
    blocks = out.shape[2]
    block_scores_kernel[(blocks, n)](
        q, keys, page_table, sequences, visible, out, keys.stride(0), keys.stride(1),
        page_table.shape[1], blocks, HEADS=heads, DIM=dim, PAGE=keys.shape[1], BLOCK=tokens,
        **tile_options(heads, tokens),
    )  # fmt: skip


def tile_options(heads: int, tokens: int) -> dict[str, int]:
    """The tokens and heads of a tile, and its warps."""
    padded = max(16, triton.next_power_of_2(heads))  # what tensor cores multiply
    rows = min(64, max(16, triton.next_power_of_2(tokens)))
    return {"TOKENS": rows, "HEADS_PADDED": padded, "num_warps": 4, "num_stages": 1}


# These differ from step to step. Compiled for their values, the kernel would be compiled while requests wait.
@triton.jit(do_not_specialize=["sequences", "visible", "pages", "blocks"])
def block_scores_kernel(
    q, keys, page_table, sequences, visible, out, page_stride, token_stride, pages, blocks,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS_PADDED: tl.constexpr,
):  # fmt: skip
    """As block_scores_op.py: block_scores. A program scores one block for one query, and reads keys only if
    the query sees some of them."""
    query = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    seen = tl.load(visible + query)
    head = tl.arange(0, HEADS_PADDED)
    is_head = head < HEADS
    best = tl.full((HEADS_PADDED,), float("-inf"), tl.float32)
    first = block * BLOCK
    if first < seen:
        of_dim = tl.arange(0, DIM)
        of_query = q + (query * HEADS + head)[:, None] * DIM + of_dim[None, :]
        heads = tl.load(of_query, mask=is_head[:, None], other=0.0)
        table = page_table + tl.load(sequences + query).to(tl.int64) * pages
        for start in tl.static_range(0, BLOCK, TOKENS):
            token = first + start + tl.arange(0, TOKENS)
            is_seen = (token < seen) & (start + tl.arange(0, TOKENS) < BLOCK)
            page = tl.load(table + token // PAGE, mask=is_seen, other=0).to(tl.int64)
            places = page * page_stride + token % PAGE * token_stride
            key = tl.load(keys + places[:, None] + of_dim[None, :], mask=is_seen[:, None], other=0.0)
            products = tl.dot(heads, tl.trans(key))  # [heads, tokens]
            best = tl.maximum(best, tl.max(tl.where(is_seen[None, :], products, float("-inf")), 1))
    tl.store(out + (query * HEADS + head) * blocks + block, best, mask=is_head)
